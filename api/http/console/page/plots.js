// Small plots of the figures that the feed remembers: lines over the last minutes, and the newest value.

import { h } from "./dom.js";
import { seconds } from "./format.js";

const WIDTH = 300;
const HEIGHT = 72;
const SPAN = 600; // seconds at most; less while the page is young
const LEAST_SPAN = 60;

export function plot({ title, lines, unit, most }, history) {
  const newest = history.at(-1) ?? {};
  const until = newest.at ?? 0;
  const span = Math.min(SPAN, Math.max(LEAST_SPAN, until - (history[0]?.at ?? until)));
  const points = history.filter((each) => each.at >= until - span);
  const values = points.flatMap((each) => lines.map(([, name]) => each[name] ?? 0));
  const top = most ?? Math.max(1e-9, ...values) * 1.15;
  const x = (at) => WIDTH - ((until - at) / span) * WIDTH;
  const y = (value) => HEIGHT - (Math.min(value, top) / top) * (HEIGHT - 4) - 1;
  const known = values.some((value) => value > 0) || points.some((each) => lines.some(([, name]) => each[name] !== undefined));
  return h("figure", { class: "plot", key: title },
    h("figcaption", {}, h("h3", {}, title),
      h("p", { class: "legend" }, lines.map(([label, name], index) =>
        h("span", { class: `line-${index}`, key: label }, h("i", {}), `${label} `, h("b", {}, unit(newest[name])))))),
    h("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
      "aria-label": `${title}, the last ${seconds(span)}: ${lines.map(([label, name]) => `${label} ${unit(newest[name])}`).join(", ")}`,
    },
    h("path", { class: "grid", d: `M0 ${HEIGHT - 1}H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 1H${WIDTH}` }),
    known && lines.map(([label, name], index) => {
      const path = line(points, name, x, y);
      return path && [
        index === 0 && h("path", { class: "area", d: `${path.d}L${path.end} ${HEIGHT}L${path.begin} ${HEIGHT}Z`, key: "area" }),
        h("path", { class: `line line-${index}`, d: path.d, key: label }),
      ];
    })),
    h("p", { class: "axis" }, h("span", {}, `${seconds(span)} ago`), h("span", {}, known ? `up to ${unit(top)}` : "nothing yet")));
}

// The path of one figure; where it is unknown for a moment the line goes straight on.
function line(points, name, x, y) {
  const known = points.filter((each) => each[name] !== undefined).map((each) => [x(each.at).toFixed(1), y(each[name]).toFixed(1)]);
  if (known.length < 2) return null;
  return { d: `M${known.map((each) => each.join(" ")).join("L")}`, begin: known[0][0], end: known.at(-1)[0] };
}
