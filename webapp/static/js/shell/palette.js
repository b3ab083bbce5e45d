// The command palette finds jobs, hosts, projects, pages, and actions of the current page.
import { copyText, el } from "../dom.js";
import { showKeys, usable, use, getWords } from "./keys.js";

const DELAY_MS = 120;

/** Returns the items whose words contain each word of `query`. Items that begin with `query` come first. */
export function matching(items, query) {
  const text = query.trim().toLowerCase();
  const parts = text.split(/\s+/).filter(Boolean);
  const holds = items.filter(({ words }) => parts.every((part) => words.toLowerCase().includes(part)));
  const begins = ({ words }) => (text && words.toLowerCase().startsWith(text) ? 0 : 1);
  return holds.sort((one, other) => begins(one) - begins(other)); // the sort is stable
}

/** Returns the actions of the current page, then the pages. */
export function ofPage() {
  const seen = new Set();
  const found = usable(".page-head .actions :is(a, button), main [data-command]");
  const actions = [...found, ...document.querySelectorAll(".own [data-command]")]
    .map((node) => ({ kind: "action", words: getWords(node), key: node.dataset.key ?? "", run: () => use(node) }))
    .filter(({ words }) => words && !seen.has(words) && seen.add(words));
  const job = document.getElementById("job");
  if (job) actions.push({ kind: "action", words: "Copy as JSON", key: "", run: () => copyJson(JSON.parse(job.textContent).id) });
  actions.push({ kind: "action", words: "Show keyboard shortcuts", key: "?", run: showKeys });
  const toggle = document.getElementById("theme-toggle");
  actions.push({ kind: "action", words: toggle.getAttribute("aria-label") ?? "Switch theme", key: "", run: () => toggle.click() });
  const pages = [...document.querySelectorAll("[data-go]")].map((link) => ({
    kind: "page",
    words: getWords(link),
    key: `g ${link.dataset.go}`,
    run: () => link.click(),
  }));
  return [...actions, ...pages];
}

async function copyJson(id) {
  const answer = await fetch(`/api/v1/jobs/${id}`, { headers: { Accept: "application/json" } }).catch(() => null);
  const copied = answer?.ok && (await copyText(JSON.stringify(await answer.json(), null, 2)));
  const why = answer?.ok ? "The browser blocked the copy" : "The board did not return the job";
  const message = el("div", { className: "message", role: "status" }, copied ? "Job copied as JSON." : `${why}. Open the JSON at `);
  message.dataset.tone = copied ? "info" : "warn";
  if (!copied) message.append(el("a", { href: `/api/v1/jobs/${id}` }, `/api/v1/jobs/${id}`));
  document.getElementById("main").prepend(message);
}

async function fetched(url, query, signal) {
  const answer = await fetch(`${url}?${new URLSearchParams({ q: query })}`, { headers: { Accept: "application/json" }, signal });
  if (!answer.ok || answer.redirected) throw new Error("The board did not answer.");
  const { jobs, hosts, projects } = await answer.json();
  const goes = (path) => () => location.assign(path);
  return [
    ...jobs.map((job) => ({ kind: job.status, words: job.name, note: job.id, run: goes(job.url) })),
    ...hosts.map((host) => ({ kind: "host", words: host.name, note: host.state, run: goes(host.url) })),
    ...projects.map((project) => ({ kind: "project", words: project.name, run: goes(project.url) })),
  ];
}

/** Creates the dialog. `opener` has the search address. */
export function palette(opener) {
  const input = el("input", { type: "text", autocomplete: "off", spellcheck: false, placeholder: "Find a job, host, project, page, or action" });
  for (const [name, value] of Object.entries({ role: "combobox", "aria-label": "Find a job, host, project, page, or action", "aria-expanded": "true", "aria-controls": "palette-list", "aria-autocomplete": "list" })) input.setAttribute(name, value);
  const list = el("ul", { id: "palette-list", role: "listbox", ariaLabel: "Results" });
  const output = el("span", { role: "status", className: "visually-hidden" });
  const hint = el("p", { className: "note" }, "↑ ↓ select", el("span", {}, "Enter opens"), el("span", {}, "Esc closes"), output);
  const dialog = el("dialog", { className: "palette", ariaLabel: "Find" }, input, list, hint);
  document.body.append(dialog);
  let items = [];
  let at = 0;
  let asking = null;
  let elsewhere = ""; // state of the request while the board has not answered
  let timer = null;

  function draw() {
    list.replaceChildren(
      ...items.map((item, index) => {
        const note = item.note ? el("span", { className: "note" }, item.note) : null;
        const key = item.key ? el("kbd", {}, item.key) : null;
        const line = el("li", { id: `palette-${index}`, role: "option" }, el("span", {}, item.words), note, el("span", { className: "note" }, item.kind), key);
        line.setAttribute("aria-selected", String(index === at));
        line.addEventListener("mousemove", () => index !== at && go(index));
        line.addEventListener("click", () => run(item));
        return line;
      }),
    );
    if (items.length) input.setAttribute("aria-activedescendant", `palette-${at}`);
    else input.removeAttribute("aria-activedescendant");
    output.textContent = `${items.length} result${items.length === 1 ? "" : "s"}. ${elsewhere}`;
    const words = elsewhere || (items.length === 0 ? "No results." : "");
    if (words) list.append(el("li", { className: "note", role: "presentation" }, words));
  }

  function go(to) {
    if (items.length === 0) return;
    list.children[at]?.setAttribute("aria-selected", "false");
    at = (to + items.length) % items.length;
    const line = list.children[at];
    line.setAttribute("aria-selected", "true");
    line.scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", line.id);
  }

  function run(item) {
    dialog.close();
    item.run();
  }

  async function find() {
    asking?.abort();
    const mine = new AbortController();
    asking = mine;
    const query = input.value;
    const here = matching(ofPage(), query);
    items = here;
    at = 0;
    elsewhere = "Searching…";
    draw();
    try {
      const there = await fetched(opener.dataset.findUrl, query, mine.signal);
      if (mine !== asking) return;
      const chosen = items[at];
      items = query.trim() ? [...there, ...here] : [...here, ...there];
      at = at === 0 ? 0 : Math.max(0, items.indexOf(chosen));
      elsewhere = "";
    } catch {
      if (mine !== asking) return;
      elsewhere = "Search is unavailable. The board did not answer.";
    }
    draw();
  }

  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      timer = null;
      find();
    }, DELAY_MS);
  });
  input.addEventListener("keydown", (event) => {
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: Math.min(items.length - 1, at + 8), PageUp: Math.max(0, at - 8) };
    if (event.key in moves) go(moves[event.key]);
    else if (event.key === "Enter") chooseNow();
    else return;
    event.preventDefault();
  });

  /** Runs the selected item, after a pending search. */
  async function chooseNow() {
    if (timer !== null) {
      clearTimeout(timer);
      timer = null;
      await find();
    }
    if (items[at]) run(items[at]);
  }

  return () => {
    if (dialog.open) return dialog.close();
    input.value = "";
    dialog.showModal();
    return find();
  };
}
