// The one time range and the one cursor of all charts of a page, kept in its address. Times are unix seconds.

const EMPTY = { from: null, to: null, last: null, at: null };
const NAMES = Object.keys(EMPTY);
const LEAST_S = 0.01; // shorter stretches are slips of the hand

const number = (text) => (text !== null && text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : null);

/** What an address says: from and to, or the last so many seconds, or neither; and where the cursor is pinned. */
export function readView(search) {
  const query = new URLSearchParams(search);
  const told = Object.fromEntries(NAMES.map((name) => [name, number(query.get(name))]));
  if (told.from === null || told.to === null || told.to - told.from < LEAST_S) [told.from, told.to] = [null, null];
  if (told.from !== null || !(told.last > 0)) told.last = null;
  return told;
}

/** The address' query with the view in it; what else it holds stays. */
export function writeView(search, view) {
  const query = new URLSearchParams(search);
  for (const name of NAMES) {
    if (view[name] === null) query.delete(name);
    else query.set(name, String(Math.round(view[name] * 1000) / 1000));
  }
  const text = query.toString();
  return text ? `?${text}` : "";
}

/** `write(search)` puts a query into the address; `search()` tells the present one. */
export function createView(search, write) {
  let now = readView(search());
  let extent = null; // of all that is known
  let pointed = null; // where keys moved the cursor to; of this visit, in no address
  const listeners = new Set();
  const pointListeners = new Set();

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
    /** Where the cursor stands while no mouse moves it, null for nowhere. */
    get cursor() {
      return pointed ?? now.at;
    },
    get pointed() {
      return pointed !== null;
    },
    /** Of all that is known, [first, newest]. */
    get extent() {
      return whole();
    },
    /** What the charts show, [from, to]. */
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
    reset() {
      point(null);
      change(EMPTY);
    },
    subscribe: (listener) => listeners.add(listener),
    onPoint: (listener) => pointListeners.add(listener),
  };
}
