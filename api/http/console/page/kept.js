// What the browser keeps for the page, or the page itself, until it is left, where the browser keeps nothing.

export function kept(name) {
  try {
    const storage = window[name];
    const probe = "penstock-probe";
    storage.setItem(probe, probe);
    storage.removeItem(probe);
    return storage;
  } catch { // it is forbidden, or full
    const values = new Map();
    return {
      getItem: (key) => values.get(key) ?? null,
      setItem: (key, value) => values.set(key, value),
      removeItem: (key) => values.delete(key),
    };
  }
}
