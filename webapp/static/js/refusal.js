// The messages of refused requests, and requests to a busy server.

/** Return the messages of a refusal. A field is added to the messages that do not name it. */
export function words(errors) {
  const whole = ({ field, in: place, message }) => field === "request" || place === "path" || message.includes(`\`${field}\``);
  return errors.map((error) => (whole(error) ? error.message : `${error.field}: ${error.message}`)).join(" ");
}

/** Return a sentence such as "No result: the server answered 502." with one period at its end. */
export const failed = (what, message) => `${what}: ${message.replace(/\.$/, "")}.`;

/** Return the messages of a failed answer, or its status if a proxy answered for the server. */
export async function refused(answer) {
  const body = await answer.json().catch(() => null);
  return body?.errors ? words(body.errors) : `the server answered ${answer.status}`;
}

/** Fetch, and repeat the request if the server is busy and names a time. */
export async function fetchPatiently(url, options, tries = 4) {
  const answer = await fetch(url, options);
  const after = Number(answer.headers.get("Retry-After"));
  if (answer.status !== 503 || !after || tries === 1) return answer;
  await new Promise((done) => setTimeout(done, 1000 * after));
  return fetchPatiently(url, options, tries - 1);
}
