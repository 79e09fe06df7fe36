// One request: its facts, and its life as a waterfall, from `GET /v1/streams/{id}/trace`.

import { link } from "./address.js";
import { Refused, json } from "./api.js";
import { h } from "./dom.js";
import { now } from "./feed.js";
import { count, moment, seconds } from "./format.js";
import { icon } from "./icons.js";
import { attempt, badge, button, fact } from "./parts.js";

const AGAIN = 1000; // milliseconds between two looks at a request that has not ended
const TOLD = new Set(["takeover", "preempted", "resumed"]); // marks that say something went another way

let known = { key: "" }; // of the request that is shown: its trace, or why there is none, and when that was asked for

export function detail(request, actions) {
  look(request);
  const { trace, fault } = known;
  const state = trace?.status ?? request.state;
  return h("section", { class: "panel detail", key: "detail", "aria-label": `Request ${request.id}` },
    h("header", { class: "panel-head" }, h("h2", { class: "id", tabindex: -1 }, request.id), state && badge(state),
      h("div", { class: "actions" }, actions,
        copyButton("Copy the id", () => request.id, "The id is copied."),
        trace && copyButton("Copy as JSON", () => JSON.stringify(trace, null, 2), "The trace is copied, as penstock trace --json prints it."),
        h("a", { class: "button plain", href: link("#/requests"), title: "Close" },
        icon("close"), h("span", { class: "hidden" }, "Close the request")))),
    fault && h("p", { class: "fault" }, fault),
    trace && [facts(trace, request), life(trace)]);
}

// Browsers lend the clipboard to pages of this host and to those over TLS alone.
function copyButton(label, text, done) {
  return navigator.clipboard && button(label, () => attempt(() => navigator.clipboard.writeText(text()), done),
    { kind: "small", key: label });
}

function look(request) {
  const key = `${request.tenant}/${request.id}`;
  if (known.key !== key) known = { key };
  const isDue = !known.at || (Date.now() - known.at > AGAIN && !known.isLost && !known.trace?.ended);
  if (known.asking || !isDue) return;
  const mine = known;
  mine.asking = true;
  json(`/v1/streams/${encodeURIComponent(request.id)}/trace?tenant=${encodeURIComponent(request.tenant)}`)
    .then((trace) => Object.assign(mine, { trace, fault: "" }))
    .catch((error) => {
      if (error instanceof Refused) Object.assign(mine, { fault: error.message, isLost: error.status === 404 });
    })
    .finally(() => {
      Object.assign(mine, { asking: false, at: Date.now() });
      document.dispatchEvent(new Event("redraw"));
    });
}

function facts(trace, request) {
  const produced = trace.usage?.completion_tokens ?? request.tokens;
  return h("dl", { class: "facts", key: "facts" },
    fact("Model", trace.model ?? "–"),
    fact("Tenant", request.tenant),
    trace.priority && fact("Priority", trace.priority),
    trace.endpoint && fact("Endpoint", trace.endpoint),
    fact("Started", moment(trace.began)),
    fact("Prompt", `${count(trace.prompt_tokens)} tokens`),
    fact("Answer", `${count(produced)} tokens`),
    fact("First token", trace.first_token ? seconds(trace.first_token - trace.began) : "–"),
    fact(trace.ended ? "Took" : "So far", seconds((trace.ended ?? now()) - trace.began)),
    (trace.finish_reasons.length > 0 || trace.error) && fact("Ended with", trace.error?.code ?? [...new Set(trace.finish_reasons)].join(", ")));
}

// The stages, one a row, over the time from the publication of the request to its end.
function life(trace) {
  const until = trace.ended ?? Math.max(now(), trace.began + 0.001);
  const scale = { from: trace.began, span: Math.max(0.001, until - trace.began), until };
  return h("div", { class: "life", key: "life" },
    trace.error && h("p", { class: "fault" }, trace.error.message),
    h("ol", { class: "waterfall", "aria-label": "What happened to the request" },
      rows(trace, scale),
      h("li", { class: "span axis", key: "axis", "aria-hidden": "true" }, h("span"), h("span", { class: "ticks" },
        [0, 0.25, 0.5, 0.75, 1].map((share) => h("span", { key: share }, seconds(share * scale.span)))), h("span"))),
    trace.marks.filter((mark) => TOLD.has(mark.kind)).map((mark, index) =>
      h("p", { class: "told", key: `told ${index}` }, h("b", {}, `after ${seconds(mark.at - trace.began)} `), mark.text)));
}

function rows(trace, scale, prefix = "") {
  return [
    trace.stages.map((visit, index) => row(visit, scale, `${prefix}${visit.stage} ${index}`, trace.ended)),
    trace.calls.map((call, index) => bars(call.name ?? `list of ${call.label}`, call.label, `${prefix}call ${index}`, [
      call.began && ["run", call.began, call.ended ?? scale.until, !call.ended, call.status],
    ], scale, call.began && (call.ended ?? scale.until) - call.began)),
    trace.turns.map((turn, index) => [
      h("li", { class: "turn-name", key: `${prefix}turn ${index}` }, `Turn ${index + 1}: `, h("code", {}, turn.id)),
      rows(turn, scale, `${prefix}${index}.`),
    ]),
  ];
}

function row(visit, scale, key, ended) {
  const { began, left, first_token: first } = visit;
  const entered = visit.entered ?? began;
  const end = left ?? ended ?? scale.until;
  const isOpen = !left && !ended;
  const kind = visit.ending === "lost" ? "bad" : visit.stage === "batch" ? "wait" : "run"; // batch waits for room
  const note = [visit.worker, visit.attempt > 1 && `delivery ${visit.attempt}`, visit.batch_size > 1 && `with ${visit.batch_size - 1} more`,
    visit.from_token > 0 && `from token ${visit.from_token}`, visit.ending === "lost" && "lost", visit.ending === "returned" && "gave it back"]
    .filter(Boolean).join(", ");
  return bars(visit.stage, note, key, [
    entered && ["wait", entered, began ?? end, isOpen && !began, "waits"],
    began && first && visit.stage === "infer" && ["prefill", began, first, false, "until its first token"],
    began && [kind, visit.stage === "infer" && first ? first : began, end, isOpen, visit.tokens ? `${visit.tokens} tokens` : "works"],
  ], scale, entered && end - entered);
}

function bars(name, note, key, found, { from, span }, took) {
  const place = (at) => Math.min(100, Math.max(0, ((at - from) / span) * 100));
  return h("li", { class: "span", key },
    h("span", { class: "span-name", title: note || undefined }, name, note && h("small", {}, note)),
    h("span", { class: "track" }, found.filter(Boolean).map(([kind, begin, end, isOpen, what], index) => h("span", {
      class: `bar ${kind}${isOpen ? " open" : ""}`, key: index, title: `${what}: ${seconds(end - begin)}`,
      style: { left: `${place(begin)}%`, width: `${Math.max(0, place(end) - place(begin))}%` },
    }))),
    h("span", { class: "number took" }, took === undefined || took === null ? "" : seconds(Math.max(0, took))));
}
