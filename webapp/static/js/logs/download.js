// A rank's whole log, fetched from its host through the board, with how far it is; and saving what is shown.
import { bytes } from "../format.js";

/** Have the browser save it under a name. */
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
    return `the board answered ${answer.status}`;
  }
}

/**
 * Calls `told({text, share})` as it comes and returns what is to be said at the end: {text, bad}. `signal` stops it.
 */
export async function fetchLog(address, signal, told) {
  let got = 0;
  try {
    told({ text: "asking the host", share: null });
    const answer = await fetch(address, { signal });
    if (!answer.ok) return { text: await refusal(answer), bad: true };
    const most = Number(answer.headers.get("Meshboard-Log-Bytes"));
    const name = /filename="([^"]+)"/.exec(answer.headers.get("Content-Disposition") ?? "")?.[1] ?? "log.txt";
    const parts = [];
    for (const reader = answer.body.getReader(); ; ) {
      const { done, value } = await reader.read();
      if (done) break;
      parts.push(value);
      got += value.length;
      told({ text: `${bytes(got)} of about ${bytes(most)}`, share: most > 0 ? Math.min(1, got / most) : null });
    }
    if (got === 0) return { text: "the log is empty: nothing was written to it", bad: false };
    save(name, parts);
    return { text: `${bytes(got)} saved as ${name}`, bad: false };
  } catch (error) {
    if (error.name === "AbortError") return { text: "stopped", bad: false };
    if (got > 0) return { text: `it broke off after ${bytes(got)}: the host fell silent, or the board is away`, bad: true };
    return { text: "the board cannot be reached", bad: true };
  }
}
