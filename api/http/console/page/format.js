// Numbers, times and names as people read them.

export function count(value) {
  if (value === undefined || value === null) return "–";
  if (value >= 1e6) return `${trim(value / 1e6)} M`;
  if (value >= 1e4) return `${trim(value / 1e3)} k`;
  return Number.isInteger(value) ? String(value) : trim(value);
}

export function rate(value) {
  return value === undefined ? "–" : value > 0 && value < 0.1 ? "< 0.1" : count(value);
}

export function seconds(value) {
  if (value === undefined || value === null) return "–";
  if (value < 0.001) return value <= 0 ? "0 s" : "< 1 ms";
  if (value < 1) return `${trim(value * 1000)} ms`;
  if (value < 120) return `${trim(value)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

export function percent(share) {
  return share === undefined ? "–" : `${trim(share * 100)} %`;
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

// A time in Unix seconds, by the reader's clock and custom.
export function moment(at) {
  return at ? new Date(at * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" }) : "–";
}

// The end of an id, which tells requests apart; the whole of a short one.
export function short(id) {
  return id.length > 18 ? `${id.slice(0, 8)}…${id.slice(-6)}` : id;
}

function trim(value) {
  const digits = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return String(Number(value.toFixed(digits)));
}
