// The badge of the live connection.
const CONNECTION = {
  reading: ["", "reading"], // not longer than "connecting", so the page does not move
  connecting: ["", "connecting"],
  live: ["good", "live"],
  delayed: ["warn", "delayed: no connection to Redis"],
  reconnecting: ["warn", "reconnecting"],
  refused: ["bad", "not allowed: reload the page"],
  outdated: ["bad", "outdated page: reload it"],
};

/** `name`: a state of `follow`, or "reading" before it starts. */
export function showConnection(badge, name, finished) {
  const [tone, label] = CONNECTION[name];
  const words = name === "delayed" && !finished ? `${label}, training continues` : label;
  badge.hidden = finished && (tone === "" || tone === "good"); // no more data follows
  badge.dataset.tone = tone;
  if (badge.textContent !== words) badge.textContent = words;
}
