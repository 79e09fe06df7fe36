// The workers: what each runs, and how full it is.

import { h } from "./dom.js";
import { count, percent, plural, rate } from "./format.js";
import { badge, empty, fact, meter, panel } from "./parts.js";

export function workers(state) {
  const found = Object.entries(state.workers).sort(([a], [b]) => (a < b ? -1 : 1));
  if (!found.length) {
    return panel("Workers", {}, empty("No worker lives", state.server.loads_models
      ? "One is started as soon as a model is asked for." : "Start one: penstock worker MODEL. What waits goes to it."));
  }
  return h("div", { class: "cards", key: "cards" }, found.map(([id, worker]) => card(id, worker)));
}

function card(id, worker) {
  const cache = worker.kv_cache;
  return h("article", { class: `panel card ${worker.state}`, key: id, "aria-label": `Worker ${id}` },
    h("header", { class: "panel-head" }, h("h2", {}, id), badge(worker.state)),
    h("p", { class: "note" }, worker.model, worker.revision > 1 && ` · revision ${worker.revision}`),
    h("div", { class: "gauge" }, h("span", {}, "Requests"),
      h("b", {}, `${count(worker.active ?? 0)} of ${worker.capacity}`), meter((worker.active ?? 0) / worker.capacity, `Requests of ${id}`)),
    cache !== undefined && h("div", { class: "gauge" }, h("span", {}, "Key-value cache"),
      h("b", {}, percent(cache)), meter(cache, `Key-value cache of ${id}`)),
    h("dl", { class: "facts" },
      fact("Tokens a second", rate(worker.tokens_per_second)),
      fact("Generated", count(worker.generated)),
      fact("Taken over", plural(worker.takeovers ?? 0, "request")),
      fact("Process", `${worker.pid}${worker.host ? ` on ${worker.host}` : ""}`)),
    worker.slow_paths?.length > 0 && h("details", {}, h("summary", {}, "Not on its fast path"),
      h("ul", {}, worker.slow_paths.map((each) => h("li", { key: each }, each)))));
}
