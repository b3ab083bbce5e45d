// Assertions that node:assert lacks.

import assert from "node:assert/strict";

/** Assert that numbers, or lists and objects of numbers, differ by at most a relative 1e-6. */
export function assertClose(actual, expected, path = "value") {
  if (typeof expected === "number" && typeof actual === "number") {
    const limit = Math.max(1e-12, 1e-6 * Math.abs(expected));
    assert.ok(Math.abs(actual - expected) <= limit, `${path}: ${actual} is not close to ${expected}`);
  } else if (expected !== null && typeof expected === "object") {
    assert.deepEqual(Object.keys(actual).sort(), Object.keys(expected).sort(), path);
    for (const [key, value] of Object.entries(expected)) assertClose(actual[key], value, `${path}.${key}`);
  } else {
    assert.deepEqual(actual, expected, path);
  }
}
