// The pipeline with its live counts, and the metrics as small plots.

import { h } from "./dom.js";
import { feed } from "./feed.js";
import { count, percent, plural, rate, seconds } from "./format.js";
import { panel } from "./parts.js";
import { plot } from "./plots.js";

const ROLES = {
  validate: "checks and tokenises", queue: "admits", batch: "waits for room", infer: "computes", stream: "makes events",
  tools: "calls tools",
};
const PLOTS = [
  { title: "Tokens a second", lines: [["generated", "tokens_per_second"]], unit: count },
  { title: "Requests a second", lines: [["completed", "completed"], ["refused", "refused"], ["failed", "failed"]], unit: rate },
  { title: "Time to the first token", lines: [["p50", "ttft_p50"], ["p99", "ttft_p99"]], unit: seconds },
  { title: "Time between tokens", lines: [["p50", "between_p50"], ["p99", "between_p99"]], unit: seconds },
  { title: "Time of a request", lines: [["p50", "latency_p50"], ["p99", "latency_p99"]], unit: seconds },
  { title: "Requests", lines: [["running", "active"], ["waiting", "waiting"]], unit: count },
  { title: "Oldest wait", lines: [["oldest", "oldest_waiting"]], unit: seconds },
  { title: "Key-value cache", lines: [["in use", "kv_cache"]], unit: percent, most: 1 },
  { title: "Prefix cache", lines: [["hits", "prefix_hits"]], unit: percent, most: 1 },
  { title: "Rows of a step", lines: [["mean", "batch"]], unit: count },
  { title: "Takeovers", lines: [["so far", "takeovers"]], unit: count },
  { title: "Event loop lag", lines: [["p99", "loop_lag_p99"]], unit: seconds },
];

export function overview(state) {
  const stages = Object.entries(state.pipeline).sort(([, a], [, b]) => a.index - b.index);
  const path = stages.filter(([name]) => name !== "tools");
  return [
    h("section", { class: "panel wide", "aria-label": "Pipeline", key: "pipeline" },
      h("ol", { class: "pipeline" }, path.map(([name, stage]) => stageCard(name, stage))),
      state.pipeline.tools && h("p", { class: "beside" }, "Beside it: ",
        h("strong", {}, "tools"), ` for responses, ${plural(state.pipeline.tools.waiting, "step")} waiting, `,
        plural(state.pipeline.tools.copies, "copy", "copies"))),
    h("dl", { class: "tiles", key: "tiles" }, tiles(state).map(([name, value, note, path]) =>
      h("div", { class: "tile", key: name }, h("dt", {}, h("a", { href: path }, name)),
        h("dd", {}, value, note && h("small", {}, note))))),
    panel("Metrics", { note: "the last ten minutes, while this page is open", key: "plots" },
      h("div", { class: "plots" }, PLOTS.map((each) => plot(each, feed.history)))),
  ];
}

function tiles(state) {
  const { figures, counts } = state;
  return [
    ["Running", count(counts.running ?? 0), "requests", "#/requests"],
    ["Waiting", count(counts.waiting ?? 0), figures.oldest_waiting ? `oldest ${seconds(figures.oldest_waiting)}` : "requests", "#/queue"],
    ["Tokens", rate(figures.tokens_per_second ?? 0), "a second", "#/workers"],
    ["First token", seconds(figures.ttft_p50), "median", "#/requests"],
    ["Workers", count(Object.values(state.workers).filter((each) => each.state === "live").length), "live", "#/workers"],
    ["Dead letters", count(Object.keys(state.letters).length), "to look at", "#/letters"],
  ];
}

function stageCard(name, stage) {
  const flow = stage.rate > 50 ? "fast" : stage.rate > 5 ? "medium" : stage.rate > 0 ? "slow" : "still";
  const main = name === "infer" ? ["running", stage.active] : name === "stream" || stage.waiting === undefined ? ["events/s", rate(stage.rate)] : ["waiting", stage.waiting];
  return h("li", { class: `stage ${stage.copies ? "" : "missing"}`, key: name },
    h("svg", { class: `pipe ${flow}`, viewBox: "0 0 40 12", preserveAspectRatio: "none", "aria-hidden": "true" },
      h("path", { d: "M0 6H40" })),
    h("div", { class: "stage-card" },
      h("h3", {}, name), h("p", { class: "role" }, ROLES[name] ?? "custom stage"),
      h("p", { class: "main-number" }, h("b", {}, typeof main[1] === "number" ? count(main[1]) : main[1]), ` ${main[0]}`),
      h("p", { class: "small" }, h("span", {}, main[0] === "events/s" ? "" : `${rate(stage.rate)} a second`),
        h("span", { class: "copies" }, stage.copies ? `× ${stage.copies}` : "none live"))));
}
