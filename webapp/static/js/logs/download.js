// Downloads the full log of a rank from its host, and saves the listed lines.
import { bytes } from "../format.js";

/** Save a file in the browser. */
export function save(name, parts) {
  const address = URL.createObjectURL(new Blob(parts, { type: "text/plain;charset=utf-8" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

async function refusal(answer) {
  try {
    return (await answer.json()).errors.map((error) => error.message).join("; ");
  } catch {
    return `The board answered with HTTP ${answer.status}.`;
  }
}

/**
 * Fetch a log and save it. `onProgress({text, share})` receives the progress. Return the result, {text, bad}. `signal` stops it.
 */
export async function fetchLog(address, signal, onProgress) {
  let got = 0;
  try {
    onProgress({ text: "Contacting the host…", share: null });
    const answer = await fetch(address, { signal });
    if (!answer.ok) return { text: await refusal(answer), bad: true };
    const most = Number(answer.headers.get("Meshboard-Log-Bytes"));
    const name = /filename="([^"]+)"/.exec(answer.headers.get("Content-Disposition") ?? "")?.[1] ?? "log.txt";
    const parts = [];
    for (const reader = /** @type {ReadableStream<Uint8Array>} */ (answer.body).getReader(); ; ) {
      const { done, value } = await reader.read();
      if (done) break;
      parts.push(value);
      got += value.length;
      onProgress({ text: `Downloaded ${bytes(got)} of about ${bytes(most)}`, share: most > 0 ? Math.min(1, got / most) : null });
    }
    if (got === 0) return { text: "The log is empty.", bad: false };
    save(name, parts);
    return { text: `Saved ${bytes(got)} as ${name}.`, bad: false };
  } catch (error) {
    if (error.name === "AbortError") return { text: "Download stopped.", bad: false };
    if (got > 0) return { text: `Download interrupted after ${bytes(got)}. The host or the board is unreachable.`, bad: true };
    return { text: "The board is unreachable.", bad: true };
  }
}
