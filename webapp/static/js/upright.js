// Shows characters that reverse the direction of later text as escapes, like contracts/fields.py.
// Direction marks and joiners of letters and emoji stay, because languages need them.

const TURNS = /[\u202a-\u202e\u2066-\u2069]/g;

export const upright = (text) => text.replace(TURNS, (one) => `\\u${one.codePointAt(0).toString(16)}`);
