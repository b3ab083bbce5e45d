// The level of a log line, from its text.
export const LEVELS = ["info", "warning", "error"];

const OF_RANK = /^\[[^\]]{0,40}\]:? ?/; // torch and torchrun write "[rank0]: " or "[default0]:" before a line
const TRACEBACK = /^(?:Traceback \(most recent call last\)|\s+\+ Exception Group Traceback)/;
const ERROR = /\b(?:ERROR|CRITICAL|FATAL|Segmentation fault|CUDA error|Killed)\b|\b[A-Z]\w*(?:Error|Exception)\b(?::|$)/;
const WARNING = /\bWARN(?:ING)?\b|\b[A-Z]\w*Warning:/;
const OF_GLOG = /^([WEF])\d{4} \d\d:\d\d:\d\d/;

/** Return the level of a line. `carry` remembers whether a traceback is open. */
export function findLevel(text, carry) {
  const words = text.slice(0, 400).replace(OF_RANK, "");
  if (TRACEBACK.test(words)) {
    carry.open = true;
    return "error";
  }
  if (carry.open) {
    if (words === "" || /^\s/.test(words)) return "error";
    carry.open = false; // the line that names the exception ends it
    return "error";
  }
  const letter = OF_GLOG.exec(words)?.[1];
  if (letter === "E" || letter === "F" || ERROR.test(words)) return "error";
  if (letter === "W" || WARNING.test(words)) return "warning";
  return "info";
}
