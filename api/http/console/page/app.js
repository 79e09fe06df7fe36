// The page: a frame with the panels, which shows what the feed brings.

import { link, steps } from "./address.js";
import { key, setKey } from "./api.js";
import { h, render } from "./dom.js";
import { feed, follow, reconnect } from "./feed.js";
import { icon } from "./icons.js";
import { kept } from "./kept.js";
import { button } from "./parts.js";
import { chat } from "./chat.js";
import { letters } from "./letters.js";
import { models } from "./models.js";
import { overview } from "./overview.js";
import { queue } from "./queue.js";
import { requests } from "./requests.js";
import { workers } from "./workers.js";

const PANELS = [
  { path: "", title: "Overview", icon: "pulse", view: overview },
  { path: "requests", title: "Requests", icon: "list", view: requests, count: (state) => state.counts?.running },
  { path: "queue", title: "Queue", icon: "queue", view: queue, count: (state) => state.counts?.waiting },
  { path: "models", title: "Models", icon: "cube", view: models, count: (state) => size(state.models) },
  { path: "workers", title: "Workers", icon: "chip", view: workers, count: (state) => size(state.workers) },
  { path: "letters", title: "Dead letters", icon: "alert", view: letters, count: (state) => size(state.letters) },
  { path: "chat", title: "Chat", icon: "chat", view: chat },
];
const STATUS = { live: "Live", connecting: "Connecting…", away: "Reconnecting…", locked: "Key needed" };

const app = document.getElementById("app");
const ofBrowser = kept("localStorage");
let asksForKey = false;
let drawing = false;
let version = ""; // of the server that sent this page
let frozen = null; // the state that is shown while the page is paused

// Draw soon: many changes at once are drawn together.
export function redraw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    draw();
  });
}

function draw() {
  const [path, ...rest] = steps();
  const panel = PANELS.find((each) => each.path === path) ?? PANELS[0];
  document.title = `${panel.title} · Penstock`;
  render(app,
    h("nav", { class: "side", "aria-label": "Panels" },
      h("a", { class: "brand", href: "#/", title: "Penstock" }, h("img", { src: "console/icon.svg", alt: "", width: 28, height: 28 }),
        h("span", {}, "Penstock")),
      h("ul", {}, PANELS.map((each) => entry(each, each === panel))),
      h("p", { class: "version" }, served())),
    h("div", { class: "body" },
      h("header", { class: "top" },
        h("h1", {}, panel.title),
        h("span", { class: `status ${frozen ? "connecting" : feed.status}`, role: "status" }, h("i", { class: "dot" }), frozen ? "Paused" : STATUS[feed.status]),
        button([icon(frozen ? "play" : "pause"), h("span", { class: "hidden" }, frozen ? "Go on" : "Pause")], pause,
          { kind: "plain", title: frozen ? "Go on (p)" : "Pause, to read (p)" }),
        button([icon("theme"), h("span", { class: "hidden" }, "Switch between dark and light")], switchTheme,
          { kind: "plain", title: "Dark or light" }),
        button([icon("key"), h("span", { class: "hidden" }, "API key")], () => ask(true),
          { kind: "plain", title: "API key" })),
      h("main", { id: "main", tabindex: -1, key: panel.path, class: `view ${panel.path || "overview"}` }, content(panel, rest))),
    asksForKey && keyDialog());
}

// The server's version; another one than the page's may tell what the page does not know.
function served() {
  const newest = feed.state.server?.version;
  if (!newest) return "";
  version ||= newest;
  return newest === version ? `Version ${newest}`
    : h("a", { href: "", onclick: reload }, `Version ${newest} runs: load this page again`);
}

function reload(event) {
  event.preventDefault();
  location.reload();
}

function entry(panel, current) {
  const number = panel.count?.(frozen ?? feed.state) ?? 0;
  return h("li", { key: panel.path },
    h("a", { href: `#/${panel.path}`, "aria-current": current ? "page" : undefined },
      icon(panel.icon), h("span", { class: "label" }, panel.title),
      number > 0 && h("span", { class: `count${panel.path === "letters" ? " bad" : ""}` }, String(number))));
}

function content(panel, rest) {
  if (feed.status === "locked") {
    return h("div", { class: "empty", key: "locked" },
      h("p", { class: "empty-title" }, "This server wants an API key"),
      h("p", {}, feed.reason), button("Enter a key", () => ask(true), { kind: "primary" }));
  }
  const state = frozen ?? feed.state;
  if (!state.pipeline && panel.path !== "chat") {
    return h("div", { class: "empty", key: "wait" },
      h("p", { class: "empty-title" }, feed.status === "away" ? "The server does not answer" : "One moment"),
      h("p", {}, feed.state.server?.connected === false ? "It waits for its message broker." : feed.reason || "The page connects as soon as it can."));
  }
  return panel.view(state, rest);
}

function keyDialog() {
  const close = (event) => event.target.closest("dialog").close(); // which gives the focus back
  const save = (event) => {
    event.preventDefault();
    setKey(event.target.elements.key.value.trim());
    close(event);
    reconnect();
    redraw();
  };
  return h("dialog", {
    class: "dialog", key: "key", "aria-labelledby": "key-title", onclose: () => ask(false),
    ref: (element) => element.showModal(),
  },
  h("form", { onsubmit: save },
    h("h2", { id: "key-title" }, "API key"),
    h("p", {}, "A key with the word admin, as penstock key TENANT --admin makes it. It stays in this tab."),
    h("label", {}, "Key", h("input", { name: "key", type: "password", autocomplete: "off", placeholder: key() ? "a key is set" : "sk-…" })),
    h("div", { class: "dialog-buttons" }, button("Cancel", close),
      h("button", { class: "button primary", type: "submit" }, "Save"))));
}

function ask(wanted) {
  asksForKey = wanted;
  redraw();
}

// Let the page stand still; what comes meanwhile is shown afterwards.
function pause() {
  if (!feed.state.pipeline && !frozen) return;
  frozen = frozen ? null : feed.state;
  redraw();
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  ofBrowser.setItem("penstock-theme", root.dataset.theme);
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select, dialog")) return;
  const name = nameOf(event);
  const panel = PANELS[Number(name) - 1];
  if (panel) location.hash = `#/${panel.path}`;
  else if (name === "p") pause();
  else if (name === "/") {
    draw(); // the panel that the last key has chosen may be about to be drawn
    const search = document.querySelector("input[type=search]");
    if (search) {
      event.preventDefault();
      search.focus();
    }
  } else if (name === "Escape" && location.hash.startsWith("#/requests/")) {
    location.hash = link("#/requests");
  }
}

// Some keyboards have digits only with Shift, as French ones, and others no Latin letters: there the place counts.
function nameOf({ key, code, shiftKey }) {
  if (!shiftKey && /^Digit/.test(code) && key !== "/") return code.slice(5);
  return code === "KeyP" && !/^[ -~]/.test(key) ? "p" : key;
}

function size(values) {
  return values ? Object.keys(values).length : 0;
}

const theme = ofBrowser.getItem("penstock-theme");
if (theme) document.documentElement.dataset.theme = theme;
addEventListener("hashchange", () => {
  redraw();
  scrollTo(0, 0);
});
addEventListener("keydown", pressed);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says which panel is shown
  document.getElementById("main").focus();
});
document.addEventListener("redraw", redraw);
draw();
follow(() => frozen || redraw());
