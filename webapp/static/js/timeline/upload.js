// Uploads the files of an import in parts, and starts the import.
import { embedded, write } from "../dom.js";
import { bytes, integer } from "../format.js";
import { refused } from "../refusal.js";

const PROGRESS_INTERVAL_MS = 1000;
const limits = embedded("limits");
const form = document.getElementById("upload");
const input = document.getElementById("files");
const drop = document.getElementById("drop");
const bar = document.getElementById("upload-progress");
const output = document.getElementById("upload-status");
const button = form.querySelector("button");

function showMessage(text, bad = false) {
  write(output, text);
  output.dataset.tone = bad ? "bad" : "";
}

/** Return the problem with the chosen files, or "". */
export function problemWith(files, { files: most, file_bytes: largest, import_bytes: together }) {
  if (files.length === 0) return "Choose a file.";
  if (files.length > most) return `${integer(files.length)} files are chosen. At most ${integer(most)} files are allowed per import.`;
  const large = files.find((file) => file.size > largest);
  if (large) return `${large.name} has ${bytes(large.size)}. A file can have at most ${bytes(largest)}.`;
  const empty = files.find((file) => file.size === 0);
  if (empty) return `${empty.name} is empty.`;
  const total = files.reduce((sum, file) => sum + file.size, 0);
  return total > together ? `The files have ${bytes(total)} in total. An import can have at most ${bytes(together)}.` : "";
}

async function post(url, body, type) {
  const headers = { "Content-Type": type, "X-CSRFToken": form.elements.csrfmiddlewaretoken.value };
  const answer = await fetch(url, { method: "POST", headers, body });
  if (!answer.ok) throw new Error(await refused(answer));
  return answer.headers.get("Content-Type")?.startsWith("application/json") ? answer.json() : null;
}

/** Show how far the board has read the files, until `isDone()`. */
async function showReading(url, isDone) {
  while (!isDone()) {
    const answer = await fetch(`${url}progress/`).catch(() => null);
    const read = answer?.ok ? (await answer.json()).read : null;
    if (isDone()) return;
    if (read !== null) {
      bar.value = read;
      showMessage(read < 1 ? `Reading the files… ${Math.floor(100 * read)}%` : "Storing the events…");
    }
    await new Promise((resolve) => setTimeout(resolve, PROGRESS_INTERVAL_MS));
  }
}

async function send(files) {
  const wanted = { name: document.getElementById("import-name").value, files: files.map(({ name, size }) => ({ name, size })) };
  const { url } = await post(form.dataset.begin, JSON.stringify(wanted), "application/json");
  const total = files.reduce((sum, file) => sum + file.size, 0);
  let sent = 0;
  for (const [place, file] of files.entries()) {
    for (let offset = 0; offset < file.size; offset += limits.part_bytes) {
      const part = file.slice(offset, offset + limits.part_bytes);
      await post(`${url}files/${place}/?offset=${offset}`, part, "application/octet-stream");
      sent += part.size;
      bar.value = sent / total;
      showMessage(`${bytes(sent)} of ${bytes(total)} sent`);
    }
  }
  bar.removeAttribute("value");
  showMessage("Reading the files…");
  let done = false;
  showReading(url, () => done);
  try {
    return (await post(`${url}read/`, "", "text/plain")).url;
  } finally {
    done = true;
  }
}

async function start() {
  const files = [...input.files];
  const problem = problemWith(files, limits);
  if (problem) {
    showMessage(problem, true);
    return;
  }
  [button.disabled, bar.hidden, bar.value] = [true, false, 0];
  try {
    location.assign(await send(files));
  } catch (error) {
    showMessage(`Not imported: ${error.message}`, true);
    [button.disabled, bar.hidden] = [false, true];
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
input.addEventListener("change", () => showMessage([...input.files].map((file) => file.name).join(", ")));
for (const kind of ["dragenter", "dragover"]) {
  drop.addEventListener(kind, (event) => {
    event.preventDefault();
    drop.dataset.over = "true";
  });
}
for (const kind of ["dragleave", "drop"]) drop.addEventListener(kind, () => delete drop.dataset.over);
drop.addEventListener("drop", (event) => {
  event.preventDefault();
  input.files = event.dataTransfer.files;
  input.dispatchEvent(new Event("change"));
});
