// What a refused request was refused for, in the server's own words; and asking again where it only was too busy.

/** `errors` as every refusal has them; one of the request as a whole, or of what the page is about, names no field. */
export function words(errors) {
  const whole = ({ field, in: place }) => field === "request" || place === "path";
  return errors.map((error) => (whole(error) ? error.message : `${error.field}: ${error.message}`)).join("; ");
}

/** The words of an answer that is none; its status where a proxy answered for the server. */
export async function refused(answer) {
  const told = await answer.json().catch(() => null);
  return told?.errors ? words(told.errors) : `the server answered ${answer.status}`;
}

/** As fetch, and asks again where the server is busy and says when. */
export async function fetchPatiently(url, options, tries = 4) {
  const answer = await fetch(url, options);
  const after = Number(answer.headers.get("Retry-After"));
  if (answer.status !== 503 || !after || tries === 1) return answer;
  await new Promise((done) => setTimeout(done, 1000 * after));
  return fetchPatiently(url, options, tries - 1);
}
