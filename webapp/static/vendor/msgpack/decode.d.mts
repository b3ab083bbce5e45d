// Meshboard's declaration for the type checker, not a part of msgpack.
export function decode(data: Uint8Array | ArrayBuffer): any;
