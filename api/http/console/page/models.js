// The models on offer: their states, and what an operator changes about them.

import { json } from "./api.js";
import { h } from "./dom.js";
import { count, plural } from "./format.js";
import { attempt, badge, button, confirmed, empty, fact, meter, panel } from "./parts.js";

export function models(state) {
  const found = Object.values(state.models).sort((a, b) => (a.id < b.id ? -1 : 1));
  if (!found.length) {
    return panel("Models", {}, empty("No models yet", "A model appears here as soon as its first worker begins to load it."));
  }
  return [
    !state.server.loads_models && h("p", { class: "hint", key: "hint" },
      "This model is served by workers of its own. Start the server with --models or --model-dir to load and unload models here."),
    h("div", { class: "cards", key: "cards" }, found.map((model) => card(model, state.server.loads_models))),
  ];
}

function card(model, canChange) {
  const isLoaded = ["ready", "loading", "queued"].includes(model.state);
  const { swap } = model;
  return h("article", { class: "panel card", key: model.id, "aria-label": `Model ${model.id}` },
    h("header", { class: "panel-head" }, h("h2", {}, model.id), badge(model.state)),
    model.state === "loading" && h("div", { class: "gauge" }, h("span", {}, "Loading"),
      h("b", {}, `${model.progress ?? 0} %`), meter((model.progress ?? 0) / 100, `Progress of ${model.id}`)),
    h("dl", { class: "facts" },
      fact("Waiting", plural(model.queue_length, "request")),
      fact("Workers", count(model.workers)),
      fact("Loads", count(model.loads)),
      fact("Revision", count(model.revision))),
    model.last_error && h("p", { class: "fault" }, model.last_error),
    swap && h("div", { class: "swap" }, badge(swap.state === "failed" ? "dead" : swap.state, `swap: ${swap.state}`), ` to ${swap.source}`,
      swap.progress !== undefined && meter(swap.progress / 100, `Progress of the swap of ${model.id}`),
      swap.error && h("p", { class: "fault" }, swap.error)),
    canChange && h("div", { class: "card-actions" },
      isLoaded
        ? button("Unload", () => unload(model), { key: "unload", title: `Unload ${model.id}` })
        : button("Load", () => change("load", { model: model.id }, `${model.id} is being loaded.`), { kind: "primary", key: "load", title: `Load ${model.id}` }),
      h("form", { class: "inline", onsubmit: (event) => swapTo(event, model) },
        h("input", { name: "source", required: true, placeholder: "/path or id of the new one", "aria-label": `Swap ${model.id} to` }),
        h("button", { class: "button", type: "submit" }, "Swap"))));
}

async function unload(model) {
  if (model.queue_length && !(await confirmed(`${plural(model.queue_length, "request")} wait for ${model.id}: it will be loaded again for them. Unload it?`, "Unload"))) return;
  change("unload", { model: model.id }, `${model.id} is unloaded once it has finished what it runs.`);
}

function swapTo(event, model) {
  event.preventDefault();
  const source = event.target.elements.source.value.trim();
  event.target.reset();
  change("swap", { model: model.id, source }, `${model.id} is swapped for ${source} as soon as that has answered a test.`);
}

function change(what, body, done) {
  return attempt(() => json(`/models/${what}`, { method: "POST", body }), done);
}
