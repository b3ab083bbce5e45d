// What a refused request was refused for, in the server's own words.

/** `errors` as every refusal has them; one of the request as a whole names no field. */
export function words(errors) {
  return errors.map(({ field, message }) => (field === "request" ? message : `${field}: ${message}`)).join("; ");
}

/** The words of an answer that is none; its status where a proxy answered for the server. */
export async function refused(answer) {
  const told = await answer.json().catch(() => null);
  return told?.errors ? words(told.errors) : `the server answered ${answer.status}`;
}
