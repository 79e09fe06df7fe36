// The requests that wait, run, and have just ended; one of them with its life as a waterfall.

import { link, said, say } from "./address.js";
import { ask } from "./api.js";
import { h } from "./dom.js";
import { now } from "./feed.js";
import { count, moment, seconds, short } from "./format.js";
import { attempt, badge, button, empty, panel, table } from "./parts.js";
import { detail } from "./waterfall.js";

const TABS = [
  ["All", () => true],
  ["Running", (each) => each.state === "running"],
  ["Waiting", (each) => each.state === "waiting"],
  ["Ended", (each) => !isOpen(each)],
  ["Failed", (each) => each.state === "failed" || each.state === "expired"],
  ["Taken over", (each) => each.takeovers > 0],
];
const COLUMNS = [
  ["Request"], ["State"], ["Model"], ["Tenant"], ["Worker"], ["Tokens", "number"], ["First token", "number"], ["Time", "number"],
];
const MOST_ROWS = 60;

export function requests(state, [tenant, id]) {
  const rows = Object.values(state.requests);
  const words = said("find");
  const [tab, fits] = TABS.find(([name]) => name === said("tab")) ?? TABS[0];
  const fitting = rows.filter((each) => fits(each) && matches(each, words)).sort(newestFirst);
  const found = fitting.slice(0, MOST_ROWS);
  const chosen = id && (state.requests[`${tenant}/${id}`] ?? { tenant, id });
  return [
    chosen && detail(chosen, actions(chosen)),
    panel("Requests", {
      note: fitting.length > found.length ? `the newest ${found.length} of ${fitting.length}` : "",
      key: "list", wide: true,
      actions: h("input", {
        type: "search", placeholder: "Id, tenant, model, worker, reason", "aria-label": "Filter the requests", value: words,
        oninput: (event) => say("find", event.target.value),
      }),
    },
    h("div", { class: "tabs", role: "group", "aria-label": "Which requests" }, TABS.map(([name, counts]) =>
      h("button", { type: "button", key: name, "aria-pressed": String(name === tab), onclick: () => say("tab", name === TABS[0][0] ? "" : name) },
        name, h("span", { class: "count" }, String(rows.filter(counts).length))))),
    found.length
      ? table("Requests", COLUMNS, found.map((each) => row(each, chosen)))
      : empty("No requests here", rows.length ? "Another tab, or another word, may find some." : "As soon as a client asks for something, it is here.")),
  ];
}

export function isOpen(request) {
  return request.state === "waiting" || request.state === "running";
}

export function age(request) {
  return request.took ?? (isOpen(request) ? Math.max(0, now() - request.created) : undefined);
}

export function cancelButton(request) {
  return button("Cancel", () => attempt(
    () => ask(`/v1/streams/${encodeURIComponent(request.id)}?tenant=${encodeURIComponent(request.tenant)}`, { method: "DELETE" }),
    `${short(request.id)} is cancelled.`), { kind: "danger small", title: `Cancel ${request.id}`, key: "cancel" });
}

function actions(request) {
  return isOpen(request) && cancelButton(request);
}

function row(each, chosen) {
  const current = chosen?.id === each.id && chosen.tenant === each.tenant;
  return h("tr", { key: `${each.tenant}/${each.id}`, class: current ? "current" : "" },
    h("th", { scope: "row" }, h("a", {
      href: link(`#/requests/${encodeURIComponent(each.tenant)}/${encodeURIComponent(each.id)}`), title: each.id, class: "id",
    }, short(each.id))),
    h("td", {}, badge(each.state), each.takeovers > 0 && h("span", { class: "tag" }, each.takeovers === 1 ? "taken over" : `taken over × ${each.takeovers}`),
      each.reason && each.state !== "completed" && h("span", { class: "tag bad" }, each.reason)),
    h("td", { title: each.model }, each.model ?? "–"),
    h("td", {}, each.tenant),
    h("td", { title: each.worker }, each.worker ?? "–"),
    h("td", { class: "number" }, count(each.tokens)),
    h("td", { class: "number" }, seconds(each.first_token)),
    h("td", { class: "number", title: moment(each.created) }, seconds(age(each))));
}

function matches(each, words) {
  const text = `${each.id} ${each.tenant} ${each.model} ${each.worker} ${each.reason}`.toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function newestFirst(a, b) {
  return Number(isOpen(b)) - Number(isOpen(a)) || b.created - a.created || (a.id < b.id ? -1 : 1);
}
