// The job's websocket: replays from the last stream id seen, for as long as the page is open.
import { decode } from "../vendor/msgpack/decode.mjs";

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 8000;
const FORBIDDEN = 4403;

/** handlers: entry(batch), job(job), gap(gap), state(text: "live" | "waiting" | "ended", words) */
export function follow(jobId, handlers) {
  let after = "0-0";
  let attempt = null;
  let pause = FIRST_PAUSE_MS;

  function connect() {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const query = new URLSearchParams({ after, ...(attempt === null ? {} : { attempt }) });
    const socket = new WebSocket(`${scheme}://${location.host}/ws/jobs/${jobId}/?${query}`);
    socket.binaryType = "arraybuffer";
    socket.onopen = () => {
      pause = FIRST_PAUSE_MS;
      handlers.state("live", "live");
    };
    socket.onmessage = (event) => take(decode(new Uint8Array(event.data)));
    socket.onclose = (event) => {
      if (event.code === FORBIDDEN) {
        handlers.state("ended", "you may not see this job any more; log in again");
        return;
      }
      handlers.state("waiting", `connection lost; trying again in ${(pause / 1000).toFixed(1)} s`);
      setTimeout(connect, pause);
      pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
    };
  }

  function take(message) {
    if (message.job) {
      if (message.job.attempt !== attempt) after = "0-0";
      attempt = message.job.attempt;
      handlers.job(message.job);
    }
    if (message.gap) handlers.gap(message.gap);
    if (message.stale) handlers.state("waiting", "live data is delayed: Redis cannot be reached; training goes on");
    if (!message.entries) return;
    handlers.state("live", "live");
    for (const [id, packed] of message.entries) {
      after = id;
      handlers.entry(decode(packed));
    }
  }

  connect();
}
