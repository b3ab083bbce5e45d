// Other people's words on a page: what turns the direction of the text after it stands there as it is written (as
// contracts/plain.py has it). Marks of direction, and what joins letters and emoji, stay: languages need them.

const TURNS = /[\u202a-\u202e\u2066-\u2069]/g;

export const upright = (text) => text.replace(TURNS, (one) => `\\u${one.codePointAt(0).toString(16)}`);
