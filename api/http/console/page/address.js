// What the address says: the panel and what it shows, and behind the `?` how, so that a link to a list shows the same list.

export function steps() {
  return location.hash.split("?")[0].replace(/^#\/?/, "").split("/").map(decoded);
}

function decoded(step) {
  try {
    return decodeURIComponent(step);
  } catch {
    return step; // somebody has typed a `%`
  }
}

function parameters() {
  return new URLSearchParams(location.hash.split("?")[1]);
}

export function said(name, otherwise = "") {
  return parameters().get(name) ?? otherwise;
}

// Say it from now on, without a step in the browser's history; "" says nothing.
export function say(name, value) {
  const next = parameters();
  if (value) next.set(name, value);
  else next.delete(name);
  history.replaceState(null, "", link(location.hash.split("?")[0], next));
  document.dispatchEvent(new Event("redraw"));
}

// An address of this page that keeps what is said.
export function link(path, kept = parameters()) {
  return kept.size ? `${path}?${kept}` : path || "#/";
}
