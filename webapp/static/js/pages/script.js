// Uploads a script or an archive in parts, and offers its Python files in the form.
import { el, write } from "../dom.js";
import { bytes, integer } from "../format.js";
import { refused } from "../refusal.js";

const form = document.getElementById("script-form");
const section = document.getElementById("upload");
const source = document.getElementById("source");
const input = document.getElementById("upload-file");
const bar = document.getElementById("upload-progress");
const output = document.getElementById("upload-status");
const hidden = form.elements["script.upload"];
const path = form.elements["script.path"];
const submit = form.querySelector("button[type=submit]");

/** Return the problem with a chosen file, or "". */
function problemWith({ name, size }, maxBytes) {
  if (!/\.(py|tar\.gz|tgz|zip)$/i.test(name)) return `${name} has another format. Choose a .py, .tar.gz, or .zip file.`;
  if (size === 0) return `${name} is empty.`;
  return size > maxBytes ? `${name} has ${bytes(size)}. A file can have at most ${bytes(maxBytes)}. Put data into the data root of the hosts.` : "";
}

/** Return the checksum of a file in hexadecimal, or undefined on a page without HTTPS. */
async function checksum(file) {
  if (!globalThis.crypto?.subtle) return undefined;
  const digest = await crypto.subtle.digest("SHA-256", await file.arrayBuffer());
  return [...new Uint8Array(digest)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function request(method, url, body, type) {
  const headers = { "Content-Type": type, "X-CSRFToken": form.elements.csrfmiddlewaretoken.value };
  const answer = await fetch(url, { method, headers, body });
  if (!answer.ok) throw new Error(await refused(answer));
  return answer.json();
}

async function send(file) {
  const sha256 = await checksum(file);
  const { url, partBytes } = section.dataset;
  const opened = await request("POST", url, JSON.stringify({ name: file.name, size: file.size, sha256 }), "application/json");
  if (opened.sha256) return opened;
  for (let offset = 0; offset < file.size; offset += Number(partBytes)) {
    const part = file.slice(offset, offset + Number(partBytes));
    await request("PUT", `${url}/${opened.id}?offset=${offset}`, part, "application/octet-stream");
    bar.value = (offset + part.size) / file.size;
  }
  return request("POST", `${url}/${opened.id}/finish`, JSON.stringify({ sha256 }), "application/json");
}

function showMessage(text, bad = false) {
  write(output, text);
  output.className = bad ? "problem" : "note";
}

function offer({ name, files, unpacked_bytes: unpacked, scripts, sha256 }) {
  hidden.value = sha256;
  showMessage(`Uploaded: ${name}, ${integer(files)} ${files === 1 ? "file" : "files"}, ${bytes(unpacked)} unpacked.`);
  let list = document.getElementById("l-script.path");
  if (!list) {
    list = el("datalist", { id: "l-script.path" });
    path.after(list);
    path.setAttribute("list", list.id);
  }
  list.replaceChildren(...scripts.map((script) => el("option", { value: script })));
  if (!scripts.includes(path.value)) path.value = scripts.length === 1 ? scripts[0] : (scripts.find((script) => /(^|\/)train\.py$/.test(script)) ?? "");
}

async function start() {
  const file = input.files[0];
  hidden.value = "";
  if (!file) return;
  const problem = problemWith(file, Number(section.dataset.maxBytes));
  if (problem) {
    showMessage(problem, true);
    return;
  }
  [submit.disabled, bar.hidden, bar.value] = [true, false, 0];
  showMessage(`Uploading ${file.name}…`);
  try {
    offer(await send(file));
  } catch (error) {
    showMessage(`Not uploaded: ${error.message}`, true);
  }
  [submit.disabled, bar.hidden] = [false, true];
}

function choose() {
  const uploads = form.elements.source.value === "upload";
  section.hidden = !uploads;
  hidden.disabled = !uploads;
}

source.hidden = false;
input.addEventListener("change", start);
source.addEventListener("change", choose);
choose();
