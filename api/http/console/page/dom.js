// A small virtual DOM: `h` describes elements, `render` changes a place on the page into what is described.
// Attributes are attributes; `onclick` and its like are handlers, `style` is an object of CSS properties, and `ref` gets
// the element once, as soon as it and its children stand on the page.

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "checked", "disabled", "selected"]);

export function h(tag, props, ...children) {
  return { tag, props: props ?? {}, children: normal(children) };
}

// The described children of `target` replace those that were described there before. What has the focus keeps it,
// also where its row has moved. If it vanishes with its row, the first part of the next one gets the focus, so that a key
// that comes late cancels no other request; without a next one, `main`.
export function render(target, ...children) {
  const focused = document.activeElement;
  const row = focused?.closest("tbody tr");
  const rows = row ? [...row.parentNode.children] : [];
  patchChildren(target, normal(children));
  if (focused === document.activeElement) return;
  const place = rows.indexOf(row);
  const next = [...rows.slice(place), ...rows.slice(0, Math.max(0, place)).reverse()].find((each) => each.isConnected);
  const heir = focused?.isConnected ? focused : next?.querySelector("a, button") ?? target.querySelector("main");
  heir?.focus({ preventScroll: true });
}

// What is not shown (`condition && h(…)`) keeps its place as null, so that those behind it stay the elements they are.
function normal(children) {
  return children.flat(Infinity).map((child) => {
    if (child === null || child === undefined || child === false || child === true) return null;
    return typeof child === "object" ? child : { text: String(child) };
  });
}

function keyOf(node, index) {
  return node.text === undefined ? (node.props.key ?? `${node.tag}#${index}`) : `text#${index}`;
}

function patchChildren(parent, children) {
  const before = parent.described ?? new Map();
  const after = new Map();
  const wanted = new Map(children.map((node, index) => [node && keyOf(node, index), node]));
  for (const [key, { tag, element }] of before) {
    // At once, so that those behind it need not move: a move breaks the composition of a word in them.
    if (!wanted.has(key) || wanted.get(key).tag !== tag) element.remove();
  }
  let place = parent.firstChild;
  children.forEach((node, index) => {
    if (!node) return;
    const key = keyOf(node, index);
    const known = before.get(key);
    const element = known && known.tag === node.tag ? known.element : create(node, parent);
    after.set(key, { tag: node.tag, element });
    if (element === place) {
      place = place.nextSibling;
    } else {
      parent.insertBefore(element, place);
    }
    patch(element, node);
  });
  if (!parent.described) {
    const kept = new Set([...after.values()].map((each) => each.element));
    [...parent.childNodes].filter((each) => !kept.has(each)).forEach((each) => each.remove());
  }
  parent.described = after;
}

function create(node, parent) {
  if (node.text !== undefined) return document.createTextNode("");
  const inSvg = node.tag === "svg" || (parent.namespaceURI === SVG && parent.tagName !== "foreignObject");
  return inSvg ? document.createElementNS(SVG, node.tag) : document.createElement(node.tag);
}

function patch(element, node) {
  if (node.text !== undefined) {
    if (element.data !== node.text) element.data = node.text;
    return;
  }
  const isNew = !element.props;
  const before = element.props ?? {};
  for (const name of Object.keys(before)) {
    if (!(name in node.props)) set(element, name, undefined);
  }
  for (const [name, value] of Object.entries(node.props)) {
    if (name !== "key" && (before[name] !== value || PROPERTIES.has(name))) set(element, name, value);
  }
  element.props = node.props;
  patchChildren(element, node.children);
  if (isNew && node.props.ref) node.props.ref(element);
}

function set(element, name, value) {
  if (name === "key" || name === "ref") return;
  if (name.startsWith("on")) {
    element[name] = value ?? null;
  } else if (name === "style") {
    for (const [property, text] of Object.entries(value ?? {})) element.style.setProperty(property, text);
  } else if (PROPERTIES.has(name)) {
    if (value !== undefined && element[name] !== value) element[name] = value;
  } else if (value === undefined || value === null || value === false) {
    element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, value === true ? "" : value);
  }
}
