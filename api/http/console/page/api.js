// Asks the server, with the operator's key where keys are used.

import { kept } from "./kept.js";

const KEY = "penstock-key";
const ofTab = kept("sessionStorage");

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function key() {
  return ofTab.getItem(KEY) ?? "";
}

export function setKey(value) {
  if (value) ofTab.setItem(KEY, value);
  else ofTab.removeItem(KEY);
}

// The response of a request whose path begins behind that of the page, as a proxy may have put both below another one;
// raises `Refused` for an error, and a `TypeError` while the server is away.
export async function ask(path, { method = "GET", body, headers = {}, signal, keepalive } = {}) {
  if (/[^\x20-\xff]/.test(key())) throw new Refused(401, "No API key has these characters."); // nor can they be sent
  const all = { ...headers };
  if (key()) all.authorization = `Bearer ${key()}`;
  if (body !== undefined) all["content-type"] = "application/json";
  const response = await fetch(new URL(`.${path}`, document.baseURI), {
    method, headers: all, signal, keepalive, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store",
  });
  if (!response.ok) throw new Refused(response.status, await reason(response));
  return response;
}

export async function json(path, options) {
  return (await ask(path, options)).json();
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

// The messages of a stream of server-sent events, one after another, with their `id`, `event` and `data`. After `silence`
// milliseconds without a word it ends: a connection that a sleep or a router has cut may never say so.
export async function* messages(response, silence) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const late = setTimeout(() => reader.cancel().catch(() => {}), silence);
      const { done, value } = await reader.read().finally(() => clearTimeout(late));
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const message = { event: "message", data: "" };
        for (const line of block.split("\n")) {
          const found = /^(id|event|data): ?(.*)$/.exec(line);
          if (found) message[found[1]] = found[2];
        }
        if (message.data) yield message;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
