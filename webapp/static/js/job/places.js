// Rank placement: a square per rank with its current phase, by host.
import { el } from "../dom.js";
import { upright } from "../upright.js";
import { duration, integer } from "../format.js";

/** The work of a rank in each phase. */
export const PHASE_WORDS = { setup: "setting up", step: "training", eval: "validating", checkpoint: "saving", proof: "verifying", teardown: "ending" };
const GONE = new Set(["stopped", "zombie", "gone"]);
const STILL_S = 5; // seconds, longer than collectives of a healthy run take
const MANY = 96; // ranks, more do not fit with their numbers

/** [{host, ranks: [{rank, does, words, blamed}]}] in rank order. Pure. */
export function findPlaces(job, state) {
  const members = job.members.length > 0 ? job.members : [{ node: 0, host: null, first_rank: 0, num_ranks: job.world_size }];
  const blamed = new Map((job.diagnosis?.stragglers ?? []).map((one) => [one.rank, one.text]));
  for (const rank of job.diagnosis?.hang?.ranks ?? []) blamed.set(rank, job.diagnosis.hang.text);
  return members.map((member) => ({
    host: member.host,
    ranks: Array.from({ length: member.num_ranks }, (_, index) => {
      const rank = member.first_rank + index;
      const { does, more } = doing(rank, member, job, state);
      const why = blamed.get(rank);
      return { rank, does, blamed: why !== undefined, words: [`rank ${rank}`, member.host, does + more, why].filter(Boolean).join(" · ") };
    }),
  }));
}

function doing(rank, member, job, state) {
  const plain = (does, more = "") => ({ does, more });
  if (job.finished) {
    const { exit } = job;
    if (exit?.rank === rank && job.status === "failed") return plain("failed", exit.signal ? ` by ${exit.signal}` : "");
    return plain(job.status === "succeeded" ? "done" : "ended");
  }
  if (member.ended) return plain(member.outcome === "succeeded" ? "done" : "ended");
  const process = state.processes.get(rank);
  if (process && GONE.has(process.state)) return plain("stopped", ` (process ${process.state})`);
  const phase = state.ranks.get(rank)?.phase;
  if (member.silent) return plain("no contact", phase ? `, last ${PHASE_WORDS[phase] ?? phase}` : "");
  const still = state.standing.get(rank);
  if (still && still.still >= STILL_S) return plain("stalled", ` for ${duration(still.still)}`);
  if (phase) return plain(PHASE_WORDS[phase] ?? phase);
  return plain(job.status === "queued" ? "queued" : "starting");
}

export function placesView(section) {
  const [list, legend] = ["[data-hosts]", "[data-legend]"].map((name) => section.querySelector(name));
  let made = "";
  let squares = new Map();

  function make(places) {
    squares = new Map();
    list.replaceChildren(
      ...places.map(({ host, ranks }) => {
        const own = ranks.map(({ rank }) => {
          const square = el("span", { role: "img" }, String(rank));
          squares.set(rank, square);
          return square;
        });
        return el("div", { className: "place" }, el("h3", { title: host ?? "" }, host ?? "no host yet"), el("div", { className: "squares" }, ...own));
      }),
    );
    list.classList.toggle("many", squares.size > MANY);
    if (squares.size > MANY) section.tabIndex = 0; // the panel scrolls
  }

  return (job, state) => {
    const places = findPlaces(job, state);
    const layout = places.map(({ host, ranks }) => `${host}:${ranks.length}`).join();
    if (layout !== made) make(places);
    made = layout;
    const counts = new Map();
    for (const { rank, does, words, blamed } of places.flatMap(({ ranks }) => ranks)) {
      counts.set(does, (counts.get(does) ?? 0) + 1);
      const square = squares.get(rank);
      const shown = upright(words);
      if (square.title === shown) continue;
      square.title = shown;
      square.setAttribute("aria-label", shown);
      square.dataset.does = does.replace(" ", "-");
      square.classList.toggle("blamed", blamed);
    }
    const summary = [...counts].map(([does, number]) => `${integer(number)} ${does}`).join(" · ");
    if (legend.textContent !== summary) legend.textContent = summary;
  };
}
