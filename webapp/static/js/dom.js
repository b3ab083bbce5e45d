// Elements from data; text is always a text node, so nothing a job says can become markup.
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

export const pageData = () => JSON.parse(byId("page-data").textContent);

/** columns: [{title, number?, cell: (row) => string | Node, className?: (row) => string}] */
export function table(columns, rows, { caption } = {}) {
  const head = el("tr", {}, ...columns.map((c) => el("th", { scope: "col", class: c.number ? "number" : "" }, c.title)));
  const body = rows.map((row) =>
    el("tr", { class: row.total ? "total" : "" }, ...columns.map((c) => {
      const extra = c.className ? c.className(row) : "";
      return el("td", { class: `${c.number ? "number" : ""} ${extra}`.trim() }, c.cell(row));
    })),
  );
  const made = el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
  if (caption) made.prepend(el("caption", { class: "visually-hidden" }, caption));
  return el("div", { class: "table-wrap" }, made);
}

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A colour token as the canvas understands it: light-dark() resolved by the browser itself. */
export function resolvedColor(name) {
  const probe = el("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

export function swatch(token) {
  const mark = el("span", { class: "swatch" });
  mark.style.background = `var(${token})`;
  return mark;
}
