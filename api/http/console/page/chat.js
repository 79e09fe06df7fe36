// A chat that goes on when its bridge is killed: it asks for the rest of the answer with the id of the last event.

import { Refused, ask, messages } from "./api.js";
import { h } from "./dom.js";
import { badge, button, panel } from "./parts.js";

const AGAIN = 500; // milliseconds between two attempts to connect
const talk = []; // { role, text, thoughts, state, note, resumed }
let model = "";
let stop = null; // aborts the answer that is being read

export function chat(state) {
  const names = Object.keys(state.models ?? {}).sort();
  if (!names.includes(model)) model = names[0] ?? "";
  return panel("Chat", {
    key: "chat", wide: true,
    note: "kill the bridge in the middle: the answer goes on",
    actions: [
      h("label", { class: "choice" }, h("span", { class: "hidden" }, "Model"),
        h("select", { onchange: (event) => { model = event.target.value; } }, names.map((each) => h("option", { key: each, value: each }, each)))),
      button("New chat", clear, { disabled: !talk.length }),
    ],
  },
  h("div", { class: "talk", tabindex: 0, role: "log", "aria-label": "Conversation" },
    talk.length ? talk.map(turn) : h("p", { class: "note" }, "Ask the model something. Enter sends, Shift and Enter begin a new line.")),
  h("form", { class: "compose", onsubmit: send },
    h("textarea", { name: "text", rows: 2, placeholder: "Your message", "aria-label": "Your message", required: true, onkeydown: entered }),
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
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    event.target.form.requestSubmit();
  }
}

function send(event) {
  event.preventDefault();
  const field = event.target.elements.text;
  const text = field.value.trim();
  if (!text || stop) return;
  field.value = "";
  talk.push({ role: "user", text });
  const answer = { role: "assistant", text: "", thoughts: "", model, state: "running", note: "", resumed: 0 };
  const history = talk.map(({ role, text: content }) => ({ role, content }));
  talk.push(answer);
  read(answer, { model, messages: history, stream: true });
}

// Read an answer to its end, over as many connections as that takes.
async function read(answer, body) {
  stop = new AbortController();
  const { signal } = stop;
  const same = crypto.randomUUID(); // names the request, so that a repetition before its first event is no second one
  let last = "";
  while (answer.state === "running") {
    const headers = { "Penstock-Resumable": "true", "Penstock-Events": "true", "Idempotency-Key": same };
    if (last) headers["Last-Event-ID"] = last;
    else answer.text = answer.thoughts = "";
    try {
      const response = await ask("/v1/chat/completions", { method: "POST", body, headers, signal });
      answer.note = "";
      for await (const message of messages(response)) {
        if (message.id) last = message.id;
        if (message.data === "[DONE]") answer.state = "completed";
        else take(answer, message.event, JSON.parse(message.data));
        shown();
      }
      if (answer.state === "running") throw new TypeError("The connection broke.");
    } catch (error) {
      if (signal.aborted) {
        answer.state = "cancelled";
        answer.note = "stopped";
        cancel(last);
      } else if (error instanceof Refused && error.status !== 503) {
        answer.state = "failed";
        answer.note = error.message;
      } else {
        answer.resumed += last ? 1 : 0;
        answer.note = "the connection is gone, reconnecting";
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

function cancel(last) {
  const id = last.split("/")[0];
  if (id) ask(`/v1/streams/${encodeURIComponent(id)}`, { method: "DELETE" }).catch(() => {});
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
