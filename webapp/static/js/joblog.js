// Log lines per rank as tabs. Lines are text nodes: what a rank prints can never become markup.
import { copyText, el } from "./dom.js";

const ANSI = /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[ -/]*[0-~])/g;
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f]/g;

/** What a terminal would show of a line: no escape sequences, no control characters but the tab. */
export const plain = (text) => text.replace(ANSI, "").replace(CONTROL, "");

/** What a log's tab says: whose it is, and of a gang on which host. */
function nameOf(key, log, members) {
  const host = members.size > 1 ? members.get(log.node)?.host : null;
  const who = key < 0 ? "launcher" : `rank ${key}`;
  return host ? `${who} · ${host}` : who;
}

export function logView(root) {
  const tabs = root.querySelector("[role=tablist]");
  const view = root.querySelector(".log");
  const follow = root.querySelector("[name=follow]");
  const copy = root.querySelector("[data-copy]");
  let current = null;
  let drawn = { rank: null, total: -1, length: -1 };
  let latest = new Map();
  let hosts = new Map();

  copy.addEventListener("click", async () => {
    copy.textContent = (await copyText(view.textContent)) ? "Copied" : "Copying is forbidden";
    setTimeout(() => (copy.textContent = "Copy"), 2000);
  });
  tabs.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const all = [...tabs.children];
    const next = all[(all.indexOf(document.activeElement) + step + all.length) % all.length];
    next?.focus();
    next?.click();
  });

  function choose(rank) {
    current = rank;
    show(latest, hosts);
  }

  function showTabs(ranks) {
    const names = ranks.map((rank) => nameOf(rank, latest.get(rank), hosts));
    const wanted = names.join();
    if (tabs.dataset.ranks !== wanted) {
      tabs.dataset.ranks = wanted;
      tabs.replaceChildren(
        ...ranks.map((rank, index) => {
          const tab = el("button", { type: "button", role: "tab", id: `log-tab-${rank}` }, names[index]);
          tab.setAttribute("aria-controls", "log");
          tab.dataset.rank = rank;
          tab.addEventListener("click", () => choose(rank));
          return tab;
        }),
      );
    }
    for (const tab of tabs.children) {
      const selected = Number(tab.dataset.rank) === current;
      tab.setAttribute("aria-selected", String(selected));
      tab.tabIndex = selected ? 0 : -1;
    }
  }

  function show(logs, members = new Map()) {
    latest = logs;
    hosts = members;
    const ranks = [...logs.keys()].sort((a, b) => (a < 0 && b < 0 ? b - a : a - b));
    if (ranks.length === 0) return;
    if (current === null || !logs.has(current)) current = ranks.includes(0) ? 0 : ranks[0];
    showTabs(ranks);
    const log = logs.get(current);
    if (drawn.rank === current && drawn.total === log.total && drawn.length === log.lines.length) return;
    drawn = { rank: current, total: log.total, length: log.lines.length };
    view.setAttribute("aria-labelledby", `log-tab-${current}`);
    view.replaceChildren(
      ...log.lines.map((line) =>
        line.text === undefined
          ? el("span", { className: "skipped" }, `… ${line.skipped} lines not kept …\n`)
          : document.createTextNode(`${plain(line.text)}\n`),
      ),
    );
    if (follow.checked) view.scrollTop = view.scrollHeight;
  }

  return show;
}
