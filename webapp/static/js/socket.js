// A websocket that comes back: backoff with jitter, and replay from the last stream id it saw.
import { decode } from "../vendor/msgpack/decode.mjs";

const FIRST_DELAY_MS = 500;
const LONGEST_DELAY_MS = 15_000;
const REFUSED = new Set([4400, 4403]); // not understood, or not this user's job: trying again is no use

/**
 * `resume()` gives the query to resume with; `onJob(job)`, `onGap(node)` and `onBatch(id, batch, node)` get what
 * arrives, `node` being the member of the gang whose stream it is of; `onState` gets "connecting", "live", "delayed" (the server cannot reach Redis), "reconnecting" or "refused".
 */
export function connect(path, { resume, onJob, onGap, onBatch, onState }) {
  let delay = FIRST_DELAY_MS;
  let timer = null;
  let socket = null;
  let closed = false;
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
    socket.addEventListener("open", () => onState("live"));
    socket.addEventListener("message", (event) => {
      delay = FIRST_DELAY_MS; // a connection that delivers is a good one
      taken = taken.then(async () => {
        const told = await unpacked(event.data);
        if (socket !== mine) return; // the next one tells it again
        for (const message of Array.isArray(told) ? told : [told]) take(message);
      });
    });
    socket.addEventListener("close", (event) => {
      socket = null; // what it said and was not yet taken would call the page live
      if (closed) return;
      if (REFUSED.has(event.code)) {
        onState("refused");
        return;
      }
      onState("reconnecting");
      timer = setTimeout(open, delay * (0.75 + Math.random() / 2));
      delay = Math.min(LONGEST_DELAY_MS, delay * 2);
    });
  }

  function take(message) {
    if (message.job) onJob(message.job);
    if (message.gap) onGap(message.node ?? 0);
    const node = message.node ?? 0;
    if (message.stale) away.add(node);
    else if (message.stale === false || message.entries) away.delete(node);
    onState(away.size > 0 ? "delayed" : "live");
    if (!message.entries) return;
    for (const [id, packed] of message.entries) {
      try {
        onBatch(id, decode(packed), node);
      } catch (error) {
        console.info(`entry ${id} of node ${node} is no batch:`, error.message);
        onGap(node);
      }
    }
  }

  function retryNow() {
    if (timer === null) return;
    clearTimeout(timer);
    open();
  }

  addEventListener("online", retryNow);
  document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && retryNow());
  onState("connecting");
  open();
  return {
    close() {
      closed = true;
      clearTimeout(timer);
      socket?.close();
    },
  };
}

async function unpacked(bytes) {
  const told = decode(bytes);
  if (!told.deflated) return told;
  const inflated = new Blob([told.deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
  return decode(await new Response(inflated).arrayBuffer());
}
