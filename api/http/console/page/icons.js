// The icons, drawn with lines of one width.

import { h } from "./dom.js";

const PATHS = {
  pulse: "M3 12h4l3-8 4 16 3-8h4",
  list: "M8 6h13M8 12h13M8 18h13M3.5 6h.01M3.5 12h.01M3.5 18h.01",
  queue: "M4 5h16M4 10h16M4 15h10M4 20h6",
  cube: "M12 3l8 4.5v9L12 21l-8-4.5v-9zM4 7.5l8 4.5 8-4.5M12 12v9",
  chip: "M7 7h10v10H7zM10 3v4M14 3v4M10 17v4M14 17v4M3 10h4M3 14h4M17 10h4M17 14h4",
  alert: "M12 4l9 16H3zM12 10v4M12 17h.01",
  chat: "M4 5h16v11H9l-5 4z",
  theme: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  key: "M15.5 4a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9zM12.2 11.8L4 20M7 17l2.5 2.5",
  pause: "M8 5v14M16 5v14",
  play: "M7 5l12 7-12 7z",
  close: "M6 6l12 12M18 6L6 18",
};

export function icon(name) {
  return h("svg", { class: "icon", viewBox: "0 0 24 24", width: 20, height: 20, "aria-hidden": "true" },
    h("path", { d: PATHS[name] }));
}
