// A websocket that comes back: backoff with jitter, and replay from the last stream id it saw.
import { decode } from "../vendor/msgpack/decode.mjs";

const FIRST_DELAY_MS = 500;
const LONGEST_DELAY_MS = 15_000;
const SILENCE_MS = 20_000; // the server sends a message every 5 s (POLL_S, jobs/runs/live/consumers.py)
const REFUSED = new Set([4400, 4403]); // not understood, or not this user's job: trying again is no use

/**
 * `resume()` gives the query to resume with; `onJob(job, again)`, `onGap(node, again)` and `onBatch(id, batch, node)` get
 * what arrives, `node` being the member of the gang whose stream it is of, `again` whether there was a connection before
 * this one; `onState` gets "connecting", "live", "delayed" (the server cannot reach Redis), "reconnecting" or "refused".
 */
export function connect(path, { resume, onJob, onGap, onBatch, onState }) {
  let delay = FIRST_DELAY_MS;
  let timer = null;
  let silence = null;
  let socket = null;
  let again = false;
  let taken = Promise.resolve(); // messages are taken one after the other, though some have to be inflated first
  const away = new Set(); // nodes whose streams the server cannot read

  function open() {
    timer = null;
    away.clear();
    const url = new URL(path, location.href);
    url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    for (const [name, value] of Object.entries(resume())) url.searchParams.set(name, value);
    const mine = new WebSocket(url);
    socket = mine;
    socket.binaryType = "arraybuffer";
    listen(mine);
    socket.addEventListener("open", () => onState("live"));
    socket.addEventListener("message", (event) => {
      if (socket !== mine) return;
      delay = FIRST_DELAY_MS; // a connection that delivers is a good one
      listen(mine);
      taken = taken.then(async () => {
        const messages = await unpacked(event.data);
        for (const message of Array.isArray(messages) ? messages : [messages]) if (socket === mine) take(message); // a new connection sends it again
      }).catch((error) => {
        console.info("a message cannot be taken:", error.message);
        mine.close();
        lost(mine);
      });
    });
    socket.addEventListener("close", (event) => lost(mine, event.code));
  }

  /** A broken connection may send no close event, so silence counts as a loss. */
  function listen(mine) {
    clearTimeout(silence);
    silence = setTimeout(() => {
      mine.close();
      lost(mine);
    }, SILENCE_MS);
  }

  function lost(mine, code) {
    if (socket !== mine) return;
    clearTimeout(silence);
    [socket, again] = [null, true]; // its messages would mark the page as live
    if (REFUSED.has(code)) {
      onState("refused");
      return;
    }
    onState("reconnecting");
    timer = setTimeout(open, delay * (0.75 + Math.random() / 2));
    delay = Math.min(LONGEST_DELAY_MS, delay * 2);
  }

  function take(message) {
    if (message.job) onJob(message.job, again);
    if (message.gap) onGap(message.node ?? 0, again);
    const node = message.node ?? 0;
    if (message.stale) away.add(node);
    else if (message.stale === false || message.entries) away.delete(node);
    onState(away.size > 0 ? "delayed" : "live");
    if (!message.entries) return;
    for (const [id, packed] of message.entries) {
      try {
        onBatch(id, decode(packed), node);
      } catch (error) {
        console.info(`entry ${id} of node ${node} is not a batch:`, error.message);
        onGap(node, false);
      }
    }
  }

  function retryNow() {
    if (timer === null) return;
    clearTimeout(timer);
    open();
  }

  const onSight = () => document.visibilityState === "visible" && retryNow();
  addEventListener("online", retryNow);
  document.addEventListener("visibilitychange", onSight);
  onState("connecting");
  open();
  return {
    close() {
      const mine = socket;
      socket = null; // later messages are dropped
      clearTimeout(timer);
      clearTimeout(silence);
      removeEventListener("online", retryNow);
      document.removeEventListener("visibilitychange", onSight);
      mine?.close();
    },
  };
}

async function unpacked(bytes) {
  const message = decode(bytes);
  if (!message.deflated) return message;
  const inflated = new Blob([message.deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
  return decode(await new Response(inflated).arrayBuffer());
}
