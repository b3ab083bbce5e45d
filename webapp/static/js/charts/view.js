// The time range and the cursor of all charts of a page. The address stores both. Times are unix seconds.

const EMPTY = { from: null, to: null, last: null, at: null };
const NAMES = Object.keys(EMPTY);
const LEAST_S = 0.01; // a shorter drag is a click

const number = (text) => (text !== null && text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : null);

/** Read the view from an address: `from` and `to`, or the `last` seconds, or neither, and the time of the pin (`at`). */
export function readView(search) {
  const query = new URLSearchParams(search);
  /** @type {Record<string, number | null>} */
  const view = Object.fromEntries(NAMES.map((name) => [name, number(query.get(name))]));
  if (view.from === null || view.to === null || view.to - view.from < LEAST_S) [view.from, view.to] = [null, null];
  if (view.from !== null || !(view.last !== null && view.last > 0)) view.last = null;
  return view;
}

/** Write the view into the query of an address. Other parameters stay. */
export function writeView(search, view) {
  const query = new URLSearchParams(search);
  for (const name of NAMES) {
    if (view[name] === null) query.delete(name);
    else query.set(name, String(Math.round(view[name] * 1000) / 1000));
  }
  const text = query.toString();
  return text ? `?${text}` : "";
}

/** `write(search)` puts a query into the address. `search()` returns the current query. */
export function createView(search, write) {
  let now = readView(search());
  let extent = null; // first and last time with data
  let pointed = null; // time of the cursor that keys moved, not in the address
  const listeners = new Set();
  const pointListeners = new Set();
  const hoverListeners = new Set();

  function change(next) {
    now = { ...now, ...next };
    write(writeView(search(), now));
    for (const listener of listeners) listener();
  }

  const whole = () => extent ?? [0, 1];

  function point(at) {
    if (at === pointed) return;
    pointed = at;
    for (const listener of pointListeners) listener();
  }

  return {
    get now() {
      return now;
    },
    /** The time of the cursor while the mouse is elsewhere, or null. */
    get cursor() {
      return pointed ?? now.at;
    },
    get pointed() {
      return pointed !== null;
    },
    /** The first and the last time with data. */
    get extent() {
      return whole();
    },
    /** The range of the charts, [from, to]. */
    window() {
      if (now.from !== null) return [now.from, now.to];
      const [first, newest] = whole();
      return now.last === null ? [first, newest] : [Math.max(first, newest - now.last), newest];
    },
    extend(first, newest) {
      extent = [first, Math.max(newest, first + 1)];
    },
    zoom: (from, to) => to - from >= LEAST_S && change({ from, to, last: null }),
    follow: (seconds) => change({ from: null, to: null, last: seconds }),
    pin: (at) => change({ at }),
    point,
    /** Report the time under the mouse, or null, and whether the chart has a step axis. */
    hover(at, fromSteps) {
      for (const listener of hoverListeners) listener(at, fromSteps);
    },
    reset() {
      point(null);
      change(EMPTY);
    },
    subscribe: (listener) => listeners.add(listener),
    onPoint: (listener) => pointListeners.add(listener),
    onHover: (listener) => hoverListeners.add(listener),
  };
}
