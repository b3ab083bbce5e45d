// The log panel of a job: choice of the source, search, follow, download.
import { copyText, el, eachFrame } from "../dom.js";
import { integer } from "../format.js";
import { getText, View } from "./lines.js";
import { makeId, LineList } from "./list.js";
import { fetchLog, save } from "./download.js";
import { findCause, showCause } from "./rootcause.js";
import { Search } from "./search.js";

const ALL = "all";
const TYPING_MS = 150;
const SAID_MS = 2000;
const ADDRESS = /^#log-(-?\d{1,6})-(\d{1,12})$/;

/** Name the source of a log, with the host if the run has several hosts. */
function formatSource(key, log, members) {
  const host = members.size > 1 ? members.get(log?.node)?.host : null;
  const who = key >= 0 ? `rank ${key}` : members.size > 1 ? `launcher ${-1 - key}` : "launcher";
  return host ? `${who} · ${host}` : who;
}

export function logView(root) {
  const named = (name) => root.querySelector(`[name=log-${name}]`);
  const part = (name) => root.querySelector(`[data-log=${name}]`);
  const [ranks, level, wrap, follow, field] = ["rank", "level", "wrap", "follow", "search"].map(named);
  let state = null;
  let job = null;
  let view = null;
  let wanted = ADDRESS.exec(location.hash);
  let picked = false; // the reader chose the source
  let unseen = 0;
  let fetching = null;
  const list = new LineList(root.querySelector("#log"), {
    formatName: (rank) => (rank < 0 ? "launcher" : `rank ${rank}`),
    scrolled: (atEnd) => setFollow(atEnd),
  });
  const redraw = eachFrame(() => list.draw());
  const search = new Search(() => {
    list.hits = search.hits;
    showFound();
    redraw();
  });

  const chosen = () => (ranks.value === ALL || ranks.value === "" ? null : Number(ranks.value));

  function setFollow(on) {
    follow.checked = on;
    if (on) unseen = 0;
    showNews();
  }

  function showNews() {
    const button = part("newest");
    button.hidden = follow.checked || unseen === 0;
    button.textContent = `${integer(unseen)} new ${unseen === 1 ? "line" : "lines"} ↓`;
  }

  /** Show other lines, from the start. */
  function reopen() {
    view = new View(chosen(), level.value);
    view.pull(state.logs);
    list.current = null;
    list.show(view.lines, { wrap: wrap.checked, ofAll: view.rank === null });
    search.begin(field.value, view.lines);
    if (follow.checked) list.toEnd();
    showSource();
  }

  function showSource() {
    part("empty").hidden = view.lines.length > 0;
    part("empty").textContent = state.logs.size > 0 ? "No lines at this level." : job?.finished ? part("empty").dataset.none : "No log lines yet.";
    const whole = part("download");
    if (whole) whole.textContent = fetching ? "Stop" : view.rank === null ? "Save lines" : "Full log";
    if (whole) whole.title = view.rank === null ? "Save the listed lines as a file" : "Download the log as written, with every state of progress bars";
  }

  /** Return the index of the current match, or -1. */
  function placeOfCurrent() {
    return list.current === null ? -1 : search.places.findIndex((place) => view.lines[place] === list.current);
  }

  function showFound() {
    const problem = part("problem");
    problem.textContent = search.problem;
    field.setAttribute("aria-invalid", String(search.problem !== ""));
    const { length } = search.places;
    const at = placeOfCurrent();
    const found = at < 0 ? `${integer(length)} found` : `${integer(at + 1)} of ${integer(length)}`;
    part("found").textContent = search.active ? `${found}${search.done ? "" : " …"}` : "";
    for (const name of ["earlier", "later"]) part(name).disabled = length === 0;
  }

  function step(by) {
    const { places } = search;
    if (places.length === 0) return;
    const at = placeOfCurrent();
    const next = at < 0 ? (by > 0 ? 0 : places.length - 1) : (at + by + places.length) % places.length;
    list.current = view.lines[places[next]];
    setFollow(false);
    list.toLine(places[next]);
    showFound();
  }

  /** Go to a line in the list, or else in the list of its rank. Return false if the line is not stored. */
  function goTo(rank, number) {
    const find = () => view.lines.findIndex((line) => line.rank === rank && line.number === number && line.skipped === undefined);
    setFollow(false);
    let index = find();
    if (index < 0) {
      picked = true;
      ranks.value = String(rank);
      level.value = "info";
      reopen();
      index = find();
    }
    if (index < 0) return false;
    list.marked = makeId(view.lines[index]);
    list.toLine(index);
    return true;
  }

  /** Go to the line in the address when the line arrives. */
  function seek() {
    if (!wanted) return;
    const [rank, number] = [Number(wanted[1]), Number(wanted[2]) - 1];
    const log = state.logs.get(rank);
    if (!log || log.next <= number) return;
    wanted = null;
    const there = goTo(rank, number);
    showMessage(there ? "" : `Line ${integer(number + 1)} of ${formatSource(rank, log, state.members)} is not in the log on this page. Download the full log.`, !there);
    root.scrollIntoView({ block: "nearest" });
  }

  function showMessage(text, bad = false) {
    part("message").textContent = text;
    part("message").dataset.tone = bad ? "bad" : "info";
    part("message").hidden = text === "";
  }

  async function download() {
    if (fetching) return fetching.abort();
    if (view.rank === null) {
      const lines = view.lines.map((line) => `${formatSource(line.rank, state.logs.get(line.rank), state.members)}\t${getText(line)}\n`);
      return save(`${job.id}-${job.attempt}-shown.log`, lines);
    }
    fetching = new AbortController();
    showSource();
    const bar = part("progress");
    const address = `/api/v1/jobs/${job.id}/logs/${view.rank}?attempt=${job.attempt}`;
    const result = await fetchLog(address, fetching.signal, ({ text, share }) => {
      showMessage(text);
      bar.hidden = false;
      if (share === null) bar.removeAttribute("value");
      else bar.value = share;
    });
    fetching = null;
    bar.hidden = true;
    showMessage(result.text, result.bad);
    return showSource();
  }

  function showRanks() {
    const keys = [...state.logs.keys()].sort((a, b) => (a < 0 && b < 0 ? b - a : a - b));
    const names = keys.map((key) => formatSource(key, state.logs.get(key), state.members));
    const wantedNames = [keys.length > 1 ? "all ranks, by time" : "", ...names].join("\n");
    if (ranks.dataset.names === wantedNames) return;
    ranks.dataset.names = wantedNames;
    const before = ranks.value;
    const options = keys.map((key, i) => el("option", { value: String(key) }, names[i]));
    if (keys.length > 1) options.unshift(el("option", { value: ALL }, "all ranks, by time"));
    ranks.replaceChildren(...options);
    const failed = findCause(job, state)?.rank ?? 0;
    const usual = keys.includes(failed) ? String(failed) : String(keys.includes(0) ? 0 : (keys[0] ?? ""));
    ranks.value = picked && options.some((option) => option.value === before) ? before : usual;
    if (ranks.value !== before || view === null) reopen();
  }

  ranks.addEventListener("change", () => {
    picked = true;
    list.marked = null;
    reopen();
  });
  for (const input of [level, wrap]) input.addEventListener("change", reopen);
  follow.addEventListener("change", () => {
    setFollow(follow.checked);
    if (follow.checked) list.toEnd();
  });
  part("newest").addEventListener("click", () => {
    setFollow(true);
    list.toEnd();
  });
  let typing = null;
  field.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      list.current = null;
      if (view) search.begin(field.value, view.lines);
    }, TYPING_MS);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    step(event.shiftKey ? -1 : 1);
  });
  part("earlier").addEventListener("click", () => step(-1));
  part("later").addEventListener("click", () => step(1));
  part("download")?.addEventListener("click", download);
  part("copy").addEventListener("click", async () => {
    const selected = getSelection();
    const inside = selected && !selected.isCollapsed && list.box.contains(selected.anchorNode);
    const text = inside ? String(selected) : (view?.lines ?? []).map((line) => `${getText(line)}\n`).join("");
    part("copy").textContent = (await copyText(text)) ? "Copied" : "Copy failed";
    setTimeout(() => (part("copy").textContent = "Copy"), SAID_MS);
  });
  addEventListener("hashchange", () => {
    wanted = ADDRESS.exec(location.hash);
    if (state) seek();
  });

  return (next, ofJob) => {
    const other = state !== null && next.logs !== state.logs; // another attempt
    state = next;
    job = ofJob;
    showCause(part("cause"), findCause(job, state), (cause) => {
      const rank = cause.rank ?? -1;
      const log = state.logs.get(rank);
      const line = log?.lines.findLast((one) => one.text !== undefined && getText(one) === cause.lines[0]);
      if (line) goTo(rank, line.number);
      else showMessage("The lines of the root cause are not in the log on this page. Download the full log.", true);
    });
    if (other) ranks.dataset.names = "";
    if (other) [view, picked] = [null, false];
    showRanks();
    if (view === null) {
      view = new View(null);
      showSource();
    }
    const { from, dropped, fresh, removed } = view.pull(state.logs);
    if (dropped > 0 || removed > 0 || from < view.lines.length) {
      list.changed(from, dropped);
      search.follow(from, dropped);
      list.hits = search.hits;
      if (follow.checked) list.toEnd();
      else unseen += fresh;
      showNews();
    }
    showSource();
    seek();
  };
}
