// The wait of a queued job: position, reason, estimated start, and next action.
import { write } from "../dom.js";
import { dateTime, integer } from "../format.js";
import { headline } from "../plan/headline.js";

const ASK_MS = 10_000;

/** The texts of an answer, see jobs/pages/jobs/job_page.py. Pure. */
export function waitingWords({ place, total, reason, starts, starts_when: when, next }) {
  return {
    place: place === null ? "–" : `${integer(place)} of ${integer(total)} in the queue`,
    reason: reason || "not evaluated yet",
    starts: starts === null ? "unknown" : `about ${dateTime(new Date(starts))}, ${when}`,
    next,
  };
}

/**
 * The plan of a job in words, or null without a plan. Pure.
 * @param {Estimate} estimate
 */
export function planWords(estimate) {
  if (!estimate?.time?.interval || !estimate.memory_interval || !(estimate.stages?.length > 0)) return null;
  const { time, speed, memory, fits, traffic, axes } = headline(estimate);
  return {
    time: `${time.text} (${speed.text})`,
    memory: `${memory.text} per rank (${fits.text})`,
    traffic: `${traffic.text} per rank and step (${axes.text})`,
  };
}

/** Ask the board again while the job is queued. `getJob()` returns the job of the page. */
export function waitingView(section, getJob) {
  async function ask() {
    if (getJob().status !== "queued" || document.visibilityState !== "visible") return;
    try {
      const answer = await fetch("?part=waiting", { headers: { Accept: "application/json" } });
      if (answer.ok) fill(waitingWords(await answer.json()));
    } catch (error) {
      console.info("no queue entry:", error.message);
    }
  }

  function fill(words) {
    for (const [name, text] of Object.entries(words)) {
      const place = section.querySelector(`[data-${name}]`);
      place.parentElement.hidden = text === "";
      if (place.textContent !== text) write(place, text);
    }
  }

  function showPlan(words) {
    for (const place of section.querySelectorAll("[data-plan]")) {
      place.parentElement.hidden = !words;
      if (words) write(place, words[place.dataset.plan]);
    }
  }

  setInterval(ask, ASK_MS);
  return (job) => {
    section.hidden = job.status !== "queued";
    if (!section.hidden) showPlan(planWords(job.estimate));
    if (!section.hidden && job.wait_reason) write(section.querySelector("[data-reason]"), job.wait_reason);
  };
}
