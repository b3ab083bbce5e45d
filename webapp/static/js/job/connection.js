// How a page hears of its job, in a badge.
const CONNECTION = {
  reading: ["", "reading"], // no longer than "connecting": with a long name all below would move
  connecting: ["", "connecting"],
  live: ["good", "live"],
  delayed: ["warn", "delayed: Redis cannot be reached"],
  reconnecting: ["warn", "reconnecting"],
  refused: ["bad", "not allowed: reload the page"],
  outdated: ["bad", "stopped: the board is newer than this page, reload it"],
};

/** `name`: as `follow` tells it, or "reading" before it is asked. */
export function showConnection(badge, name, finished) {
  const [tone, told] = CONNECTION[name];
  const words = name === "delayed" && !finished ? `${told}; training goes on` : told;
  badge.hidden = finished && (tone === "" || tone === "good"); // nothing more comes
  badge.dataset.tone = tone;
  if (badge.textContent !== words) badge.textContent = words;
}
