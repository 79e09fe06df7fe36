// A chat that goes on when its bridge is killed: it asks for the rest of the answer with the id of the last event.

import { Refused, ask, messages } from "./api.js";
import { h } from "./dom.js";
import { badge, button, panel } from "./parts.js";

const AGAIN = 500; // milliseconds between two attempts to connect
const SILENCE = 60_000; // milliseconds; the server sends a comment at least every 15 s, unless it is set up otherwise
const talk = []; // { role, text, thoughts, state, note, resumed }, questions and answers in turn
let wanted = ""; // the model that the operator has chosen, which may be away for a while
let model = "";
let draft = "";
let stop = null; // aborts the answer that is being read
let id = ""; // of the request that is being answered, once the server has told it

export function chat(state) {
  const names = Object.keys(state.models ?? {}).sort();
  model = names.includes(wanted) ? wanted : names[0] ?? "";
  return panel("Chat", {
    key: "chat", wide: true,
    note: "kill the bridge in the middle: the answer goes on",
    actions: [
      h("label", { class: "choice" }, h("span", { class: "hidden" }, "Model"),
        h("select", { onchange: (event) => { model = wanted = event.target.value; } }, names.map((each) =>
          h("option", { key: each, value: each, selected: each === model }, each)))),
      button("New chat", clear, { disabled: !talk.length }),
    ],
  },
  h("div", { class: "talk", tabindex: 0, role: "log", "aria-label": "Conversation" },
    talk.length ? talk.map(turn) : h("p", { class: "note" }, "Ask the model something. Enter sends, Shift and Enter begin a new line.")),
  h("form", { class: "compose", onsubmit: send },
    h("textarea", {
      rows: 2, placeholder: "Your message", "aria-label": "Your message", required: true, value: draft,
      oninput: (event) => { draft = event.target.value; }, onkeydown: entered,
    }),
    stop ? button("Stop", () => stop.abort(), { kind: "danger", key: "stop" })
      : h("button", { class: "button primary", type: "submit", key: "send", disabled: !model }, "Send")));
}

function turn(each, index) {
  return h("article", { class: `turn ${each.role}`, key: index },
    h("h3", {}, each.role === "user" ? "You" : each.model),
    each.thoughts && h("details", {}, h("summary", {}, "Thoughts"), h("p", { class: "text" }, each.thoughts)),
    h("p", { class: "text" }, each.text, each.state === "running" && h("span", { class: "caret" })),
    (each.note || each.resumed > 0) && h("p", { class: "small" }, each.note && badge(each.state === "failed" ? "failed" : "waiting", each.note),
      !each.note && each.resumed > 0 && badge("completed", each.resumed === 1 ? "resumed once, nothing lost" : `resumed ${each.resumed} times, nothing lost`)));
}

function entered(event) {
  const isComposing = event.isComposing || event.keyCode === 229; // Safari ends a composition before its Enter
  if (event.key === "Enter" && !event.shiftKey && !isComposing) {
    event.preventDefault();
    event.target.form.requestSubmit();
  }
}

function send(event) {
  event.preventDefault();
  const text = draft.trim();
  if (!text || stop) return;
  draft = "";
  talk.push({ role: "user", text });
  const answer = { role: "assistant", text: "", thoughts: "", model, state: "running", note: "", resumed: 0 };
  const answered = talk.filter((_, index) => talk[index | 1]?.text !== ""); // the others would only fail again
  const history = answered.map(({ role, text: content }) => ({ role, content }));
  talk.push(answer);
  shown();
  read(answer, { model, messages: history, stream: true });
}

// Read an answer to its end, over as many connections as that takes.
async function read(answer, body) {
  stop = new AbortController();
  const { signal } = stop;
  // Names the request, so that a repetition before its first event is no second one. Browsers have `randomUUID` for pages
  // of this host and those over TLS alone.
  const same = crypto.getRandomValues(new Uint32Array(4)).join("-");
  id = "";
  let last = "";
  let isBroken = false;
  while (answer.state === "running") {
    const headers = { "Penstock-Resumable": "true", "Penstock-Events": "true", "Idempotency-Key": same };
    if (last) headers["Last-Event-ID"] = last;
    else answer.text = answer.thoughts = "";
    try {
      const response = await ask("/v1/chat/completions", { method: "POST", body, headers, signal });
      id = response.headers.get("x-request-id");
      answer.note = "";
      if (isBroken && last) answer.resumed += 1;
      isBroken = false;
      for await (const message of messages(response, SILENCE)) {
        if (message.id) last = message.id;
        if (message.data === "[DONE]") Object.assign(answer, { state: "completed", note: "" });
        else take(answer, message.event, JSON.parse(message.data));
        shown();
      }
      if (answer.state === "running") throw new TypeError("The connection broke.");
    } catch (error) {
      if (signal.aborted) {
        answer.state = "cancelled";
        answer.note = "stopped";
        cancel();
      } else if (error instanceof Refused && error.status !== 503) {
        answer.state = "failed";
        answer.note = error.message;
      } else {
        isBroken = true;
        answer.note = error instanceof Refused ? error.message : "the connection is gone, reconnecting";
        shown();
        await new Promise((resolve) => setTimeout(resolve, AGAIN));
      }
    }
  }
  stop = null;
  shown();
}

function take(answer, event, data) {
  if (event === "status") {
    answer.note = data.type === "queued" ? `waiting, position ${data.position}` : `the model loads${data.progress === undefined ? "" : `, ${data.progress} %`}`;
  } else if (data.error) {
    answer.state = "failed";
    answer.note = data.error.message;
  } else {
    const delta = data.choices?.[0]?.delta ?? {};
    if (delta.content || delta.reasoning_content) answer.note = "";
    answer.text += delta.content ?? "";
    answer.thoughts += delta.reasoning_content ?? delta.reasoning ?? "";
  }
}

function cancel() {
  if (id) ask(`/v1/streams/${encodeURIComponent(id)}`, { method: "DELETE", keepalive: true }).catch(() => {});
}

function clear() {
  stop?.abort();
  talk.length = 0;
  shown();
}

function shown() {
  document.dispatchEvent(new Event("redraw"));
  const log = document.querySelector(".talk");
  if (log && log.scrollHeight - log.scrollTop - log.clientHeight < 120) {
    requestAnimationFrame(() => requestAnimationFrame(() => { log.scrollTop = log.scrollHeight; }));
  }
}

// Nobody can read the rest of an answer whose page is gone.
addEventListener("pagehide", (event) => {
  if (stop && !event.persisted) cancel();
});
