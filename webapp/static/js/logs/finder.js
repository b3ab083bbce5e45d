// A worker that finds matches of a regular expression in texts. The page stops the worker if a search takes too long.
const MOST_RANGES = 20; // marked matches per line

onmessage = ({ data: { id, source, flags, texts } }) => {
  const expression = new RegExp(source, flags);
  const hits = [];
  for (const [index, text] of texts.entries()) {
    expression.lastIndex = 0;
    const ranges = [];
    let hit = false;
    for (let found = expression.exec(text); found && ranges.length < MOST_RANGES; found = expression.exec(text)) {
      hit = true;
      if (found[0] === "") expression.lastIndex += text.codePointAt(found.index) > 0xffff ? 2 : 1; // skip a whole surrogate pair
      else ranges.push([found.index, found.index + found[0].length]);
    }
    if (hit) hits.push([index, ranges]);
  }
  postMessage({ id, hits });
};
