// Dead letters: the messages that failed for good, to read, send again, or drop.

import { json } from "./api.js";
import { h } from "./dom.js";
import { plural, short } from "./format.js";
import { attempt, button, confirmed, empty, panel, table, toast } from "./parts.js";

const COLUMNS = [["Number", "number"], ["Stage"], ["Reason"], ["Requests"], ["Deliveries", "number"], [""]];
const shown = new Map(); // whole letters that the operator has opened, by number

export function letters(state) {
  const found = Object.values(state.letters).sort((a, b) => b.number - a.number);
  return panel("Dead letters", {
    note: found.length ? "messages that a stage has given up; their clients were told that they failed" : "",
    actions: found.length > 1 && button("Retry all", () => retryAll(found)),
  },
  found.length
    ? table("Dead letters", COLUMNS, found.flatMap((each) => [row(each), shown.has(each.number) && whole(each)]).filter(Boolean))
    : empty("No dead letters", "What a stage cannot handle after several attempts lands here, and nowhere else."));
}

function row(letter) {
  const number = letter.number;
  const open = shown.has(number);
  return h("tr", { key: number },
    h("td", { class: "number" }, String(number)),
    h("td", {}, letter.stage),
    h("th", { scope: "row", class: "reason" }, letter.reason || "–"),
    h("td", { class: "ids" }, letter.requests.length ? letter.requests.map((each) => h("code", { key: each, title: each }, short(each))) : "unreadable"),
    h("td", { class: "number" }, letter.deliveries),
    h("td", { class: "end" },
      button(open ? "Hide" : "Show", () => toggle(number), { kind: "small", key: "show", title: `Show dead letter ${number}` }),
      button("Retry", () => retry(letter), { kind: "small primary", key: "retry", title: `Retry dead letter ${number}` }),
      button("Drop", () => drop(letter), { kind: "small danger", key: "drop", title: `Drop dead letter ${number}` })));
}

function whole(letter) {
  const { headers, payload, payload_hidden: hidden } = shown.get(letter.number);
  return h("tr", { key: `${letter.number} whole`, class: "whole" }, h("td", { colspan: COLUMNS.length },
    h("h3", {}, "Headers"),
    h("pre", { tabindex: 0 }, Object.entries(headers).map(([name, value]) => `${name}: ${value}`).join("\n")),
    h("h3", {}, "Payload"),
    hidden ? h("p", { class: "note" }, "Hidden, as it holds what clients wrote: start the server with --show-prompts, or use penstock dead show.")
      : h("pre", { tabindex: 0 }, payload === null ? "It has expired." : JSON.stringify(payload, null, 2))));
}

async function toggle(number) {
  if (!shown.delete(number)) {
    const letter = await attempt(() => json(`/server/dead-letters/${number}`));
    if (letter) shown.set(number, letter);
  }
  document.dispatchEvent(new Event("redraw"));
}

function retry({ number }, done = ({ requests }) => `Sent again as ${requests.map(short).join(", ")}.`) {
  return attempt(() => json(`/server/dead-letters/${number}/retry`, { method: "POST" }), done);
}

async function retryAll(all) {
  if (await confirmed(`Send all ${all.length} dead letters on their way again?`, "Retry all")) {
    let sent = 0;
    for (const letter of all) sent += await retry(letter, null) ? 1 : 0;
    if (sent) toast(`Sent ${plural(sent, "dead letter")} on ${sent === 1 ? "its" : "their"} way again.`);
  }
}

async function drop({ number }) {
  if (await confirmed(`Drop dead letter ${number} for good?`, "Drop")) {
    await attempt(() => json(`/server/dead-letters/${number}`, { method: "DELETE" }), `Dead letter ${number} is dropped.`);
  }
}
