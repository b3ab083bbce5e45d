import "./support/utc.js";

import assert from "node:assert/strict";
import test from "node:test";

import * as format from "../../webapp/static/js/format.js";

test("formats bytes in powers of 1024", () => {
  assert.equal(format.bytes(0), "0 B");
  assert.equal(format.bytes(999), "999 B");
  assert.equal(format.bytes(1024), "1.00 KiB");
  assert.equal(format.bytes(1536), "1.50 KiB");
  assert.equal(format.bytes(9.996 * 1024), "10.0 KiB");
  assert.equal(format.bytes(1048575), "1.00 MiB");
  assert.equal(format.bytes(3 * 2 ** 40), "3.00 TiB");
});

test("formats rates and exact bytes", () => {
  assert.equal(format.byteRate(1.25e9), "1.25 GB/s");
  assert.equal(format.byteRate(null), "–");
  assert.equal(format.exactBytes(614727680), "614,727,680 B");
  assert.equal(format.difference(0), "0 B");
  assert.equal(format.difference(-12), "−12 B");
  assert.equal(format.difference(4096), "+4,096 B");
});

test("formats durations with the unit that fits", () => {
  assert.equal(format.duration(0.0000021), "2.10 µs");
  assert.equal(format.duration(0.0009997), "1.00 ms");
  assert.equal(format.duration(0.9997), "1.00 s");
  assert.equal(format.duration(9.999), "10.0 s");
  assert.equal(format.duration(59.99), "60.0 s");
  assert.equal(format.duration(185), "3 min 05 s");
  assert.equal(format.duration(7440), "2 h 04 min");
  assert.equal(format.duration(172799), "47 h 59 min");
  assert.equal(format.duration(1998720), "23 d 3 h");
});

test("formats counts and operations with three digits", () => {
  assert.equal(format.count(0), "0");
  assert.equal(format.count(999), "999");
  assert.equal(format.count(812.3356171284), "812.3");
  assert.equal(format.count(999999), "1.00M");
  assert.equal(format.count(124439808), "124M");
  assert.equal(format.operations(679477248), "679 MFLOP");
  assert.equal(format.operations(12.34567), "12.35 FLOP");
});

test("formats losses of converging and diverging runs", () => {
  assert.equal(format.loss(5.54321), "5.5432");
  assert.equal(format.loss(248861.4531), "2.49e+5");
  assert.equal(format.loss(-3.4e38), "-3.40e+38");
});

test("formats a ratio as 1.0000 only if both values are equal", () => {
  assert.equal(format.ratio(5, 5), "1.0000");
  assert.equal(format.ratio(123456789012, 123456789013), "< 1");
  assert.equal(format.ratio(123456789013, 123456789012), "> 1");
  assert.equal(format.ratio(1, 0), "∞");
});

test("formats the margin of error of an estimate", () => {
  const shown = [0.19, 1, 2.3, 9].map(format.sureness);
  assert.deepEqual(shown, ["±19%", "±100%", "within a factor of 3.3", "within a factor of 10"]);
});

test("formats a relative difference without a signed zero", () => {
  const shown = [10_000, 9_999, 10_001, 9_900, 12_500].map((planned) => format.relativeDifference(planned, 10_000));
  assert.deepEqual(shown, ["0%", "< 0.1%", "< 0.1%", "+1.0%", "−20%"]);
});

test("uses the singular for one", () => {
  const shown = [0, 1, 2, 1200].map((number) => format.counted(number, "rank"));
  assert.deepEqual(shown, ["0 ranks", "1 rank", "2 ranks", "1,200 ranks"]);
});

test("shortens a long name in the middle", () => {
  assert.equal(format.shortened("demo-1", 6), "demo-1");
  assert.equal(format.shortened("demo-10", 6), "dem…10");
});

test("omits the date of a time on the day of the time before", () => {
  const pairs = [
    ["2026-11-22T03:04:09Z", "2026-11-22T13:05:00Z", "13:05:00"],
    ["2026-11-22T23:59:59Z", "2026-11-23T00:00:00Z", "23 Nov 2026 00:00:00 UTC"],
    ["2025-11-22T03:04:09Z", "2026-11-22T03:04:09Z", "22 Nov 2026 03:04:09 UTC"],
  ];
  for (const [before, date, shown] of pairs) {
    assert.equal(format.timeAfter(new Date(before), new Date(date)), shown);
  }
});
