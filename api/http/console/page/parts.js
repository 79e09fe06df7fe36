// Small parts that several panels share.

import { h } from "./dom.js";

const WORDS = {
  waiting: "wait", running: "run", completed: "good", failed: "bad", cancelled: "quiet", expired: "bad",
  ready: "good", loading: "run", queued: "wait", unloaded: "quiet", draining: "wait",
  live: "good", leaving: "wait", dead: "bad", switching: "run", probing: "run",
};

export function badge(state, text = state) {
  return h("span", { class: `badge ${WORDS[state] ?? "quiet"}` }, text);
}

export function panel(title, { note, actions, key, wide } = {}, ...children) {
  return h("section", { class: `panel${wide ? " wide" : ""}`, key: key ?? title, "aria-label": title },
    h("header", { class: "panel-head" },
      h("h2", {}, title), note && h("p", { class: "note" }, note), h("div", { class: "actions" }, actions)),
    children);
}

export function empty(title, text) {
  return h("div", { class: "empty", key: "empty" }, h("p", { class: "empty-title" }, title), h("p", {}, text));
}

export function button(label, onclick, { kind = "", disabled = false, title, key } = {}) {
  return h("button", { type: "button", class: `button ${kind}`, onclick, disabled, title, key }, label);
}

export function meter(share, label) {
  const whole = Math.max(0, Math.min(1, share ?? 0));
  return h("div", {
    class: `meter${whole > 0.9 ? " high" : ""}`, role: "meter", "aria-label": label,
    "aria-valuenow": Math.round(whole * 100), "aria-valuemin": 0, "aria-valuemax": 100,
  }, h("span", { style: { width: `${whole * 100}%` } }));
}

export function fact(name, ...value) {
  return h("div", { class: "fact", key: name }, h("dt", {}, name), h("dd", {}, value));
}

export function table(caption, columns, rows) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {},
      h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, columns.map(([name, kind]) => h("th", { scope: "col", class: kind, key: name }, name)))),
      h("tbody", {}, rows)));
}

const toasts = document.getElementById("toasts");

export function toast(text, kind = "good") {
  const element = document.createElement("p");
  element.className = `toast ${kind}`;
  element.textContent = text;
  toasts.append(element);
  setTimeout(() => element.remove(), kind === "bad" ? 10_000 : 4_000);
}

// Do something for the operator, and say how it went; without `done` only if it failed.
export async function attempt(work, done) {
  try {
    const result = await work();
    if (done) toast(typeof done === "function" ? done(result) : done);
    return result;
  } catch (error) {
    toast(error instanceof TypeError ? "The server does not answer." : error.message, "bad");
    return undefined;
  }
}

// Ask the operator whether to do what cannot be undone.
export function confirmed(question, yes) {
  return new Promise((resolve) => {
    const dialog = document.createElement("dialog");
    dialog.className = "dialog";
    dialog.setAttribute("aria-label", question);
    const text = document.createElement("p");
    text.textContent = question;
    const buttons = document.createElement("div");
    buttons.className = "dialog-buttons";
    for (const [label, value, kind] of [["Cancel", "", ""], [yes, "yes", "danger"]]) {
      const each = document.createElement("button");
      each.className = `button ${kind}`;
      each.textContent = label;
      each.onclick = () => dialog.close(value);
      buttons.append(each);
    }
    dialog.append(text, buttons);
    dialog.onclose = () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    };
    document.body.append(dialog);
    dialog.showModal();
  });
}
