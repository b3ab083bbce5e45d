// A worker: which of some texts an expression matches, and where. It may never come back; who asked ends it then.
const MOST_RANGES = 20; // of a line that are marked

onmessage = ({ data: { id, source, flags, texts } }) => {
  const expression = new RegExp(source, flags);
  const hits = [];
  for (const [index, text] of texts.entries()) {
    expression.lastIndex = 0;
    const ranges = [];
    let hit = false;
    for (let found = expression.exec(text); found && ranges.length < MOST_RANGES; found = expression.exec(text)) {
      hit = true;
      if (found[0] === "") expression.lastIndex += text.codePointAt(found.index) > 0xffff ? 2 : 1; // not into a letter of two
      else ranges.push([found.index, found.index + found[0].length]);
    }
    if (hit) hits.push([index, ranges]);
  }
  postMessage({ id, hits });
};
