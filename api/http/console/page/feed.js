// What the server says of itself: a snapshot, then JSON merge patches (RFC 7386) twice a second.

import { Refused, ask, messages } from "./api.js";

const AGAIN = 1000; // milliseconds between two attempts to connect
const SILENCE = 15_000; // milliseconds; the server speaks twice a second, and every 6 s while its broker hangs
const REMEMBERED = 600; // points of each plot

export const feed = {
  state: {}, // the newest document
  status: "connecting", // or "live", "away", or "locked" where a key is missing
  reason: "", // why the server has refused, if it has
  history: [], // of the figures, the oldest first
  skew: 0, // the server's clock less ours, in seconds
};

let stop = new AbortController();

// Follow the server for ever, and call `changed` for all that is new.
export async function follow(changed) {
  while (true) {
    stop = new AbortController();
    try {
      const response = await ask("/server/events", { signal: stop.signal });
      for await (const message of messages(response, SILENCE)) {
        const data = JSON.parse(message.data);
        feed.state = message.event === "snapshot" ? data : merged(feed.state, data);
        feed.status = "live";
        remember();
        changed();
      }
    } catch (error) {
      feed.status = error instanceof Refused && [401, 403].includes(error.status) ? "locked" : "away";
      feed.reason = error instanceof Refused ? error.message : "";
    }
    if (feed.status === "live") feed.status = "away";
    changed();
    await new Promise((resolve) => {
      stop.signal.addEventListener("abort", resolve);
      if (feed.status !== "locked") setTimeout(resolve, AGAIN);
    });
  }
}

// Connect anew, with another key.
export function reconnect() {
  feed.status = "connecting";
  stop.abort();
}

export function now() {
  return Date.now() / 1000 + feed.skew;
}

function remember() {
  const { server, figures } = feed.state;
  feed.skew = server.now - Date.now() / 1000;
  const before = feed.history.at(-1);
  if (figures && (!before || server.now - before.at >= 0.9)) {
    feed.history.push({ at: server.now, ...figures });
    if (feed.history.length > REMEMBERED) feed.history.shift();
  }
}

function merged(before, patch) {
  const after = { ...before };
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete after[name];
    else if (isObject(value)) after[name] = merged(isObject(after[name]) ? after[name] : {}, value);
    else after[name] = value;
  }
  return after;
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
