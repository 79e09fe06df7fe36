// What waits for each model, in the order in which it will go.

import { h } from "./dom.js";
import { count, plural, seconds, short } from "./format.js";
import { badge, empty, panel, table } from "./parts.js";
import { age, cancelButton } from "./requests.js";

const COLUMNS = [["Position", "number"], ["Request"], ["Tenant"], ["Waiting for", "number"], ["Expected in", "number"], [""]];
const STATES = { waiting: "no worker yet", loading: "the model loads" };

export function queue(state) {
  const waiting = Object.values(state.requests).filter((each) => each.state === "waiting");
  const lanes = Map.groupBy(waiting, (each) => each.model ?? "not validated yet");
  if (!waiting.length) {
    return panel("Queue", {}, empty("Nothing waits", "Every request that came has a worker."));
  }
  const total = state.counts.waiting ?? waiting.length;
  return [...lanes].map(([model, rows]) => panel(model, {
    note: total > waiting.length ? `the first of ${plural(total, "request")}` : plural(rows.length, "request"),
  }, table(`Requests that wait for ${model}`, COLUMNS, rows.sort(first).map(row))));
}

function row(each) {
  return h("tr", { key: `${each.tenant}/${each.id}` },
    h("td", { class: "number position" }, each.position === undefined ? "–" : count(each.position)),
    h("th", { scope: "row" }, h("a", {
      href: `#/requests/${encodeURIComponent(each.tenant)}/${encodeURIComponent(each.id)}`, title: each.id, class: "id",
    }, short(each.id)), each.model_state && badge("loading", progress(each))),
    h("td", {}, each.tenant),
    h("td", { class: "number" }, seconds(age(each))),
    h("td", { class: "number" }, seconds(each.wait)),
    h("td", { class: "end" }, cancelButton(each)));
}

function progress(each) {
  return each.progress === undefined ? STATES[each.model_state] : `${STATES[each.model_state]}, ${each.progress} %`;
}

function first(a, b) {
  return (a.position ?? Infinity) - (b.position ?? Infinity) || a.created - b.created;
}
