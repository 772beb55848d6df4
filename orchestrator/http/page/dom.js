// Making elements. Everything that comes from the network goes in as text: nothing here, or anywhere on the page,
// parses HTML, and the page's policy makes the browser refuse whoever tries.

const SVG = "http://www.w3.org/2000/svg";

/** Return the element with an id; one that is missing is a mistake in the page. */
export function at(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element ${id}`);
  return found;
}

/** Return a new element: its attributes by name, and its children, of which strings become text. */
export function make(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** Return a new SVG element, as `make` does. */
export function draw(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children);
  return element;
}

/** Put children in place of what an element holds. */
export function refill(element, ...children) {
  element.replaceChildren(...children);
}

/** Set an element's text, only where it changes, so that a live region says nothing twice. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Return a table: a caption for those who cannot see what stands above it, heads, and rows of texts or elements. */
export function table(caption, heads, rows) {
  const cells = (row) =>
    row.map((cell, index) =>
      index === 0
        ? make("th", { scope: "row" }, cell)
        : make("td", { "data-head": heads[index] }, cell),
    );
  return make(
    "table",
    { role: "table" },
    make("caption", { class: "unseen" }, caption),
    make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...heads.map((head) => make("th", { scope: "col" }, head)))),
    make("tbody", { role: "rowgroup" }, ...rows.map((row) => make("tr", { role: "row" }, ...cells(row)))),
  );
}

/** Return a box that tells what went wrong. It is an alert: a screen reader says it at once. */
export function problem(text, advice = "") {
  return make("div", { class: "problem", role: "alert" }, make("p", {}, text), ...(advice ? [make("p", {}, advice)] : []));
}

/** Return a number with so many digits behind the point, as the reader's own language writes it. */
export function number(value, digits = 0) {
  return value.toLocaleString(undefined, { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Return seconds in words. */
export function seconds(value) {
  return value < 1 ? `${number(1000 * value)} ms` : `${number(value, 1)} s`;
}
