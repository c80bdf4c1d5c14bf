import assert from 'node:assert/strict';
import { test } from 'node:test';
import { coveredBefore, coverOf, partsOf } from '../../fakedist/report/page/scripts/cover.js';

const start = [40, 10, 15, 60];
const length = [10, 10, 10, 5];
const cover = coverOf(start, length, [0, 1, 2, 3]);

test('bars of all lanes cover what any of them covers', () => {
  assert.deepEqual(cover.from, [10, 40, 60]);
  assert.deepEqual(cover.to, [25, 50, 65]);
  assert.deepEqual(
    [0, 10, 12, 25, 30, 45, 100].map((at) => coveredBefore(cover, at)),
    [0, 0, 2, 15, 15, 20, 30],
  );
});

test('an interval is cut where it begins and ends to be covered', () => {
  assert.deepEqual(partsOf(cover, [5, 45], 1), [
    [5, 5, false],
    [10, 15, true],
    [25, 15, false],
    [40, 5, true],
  ]);
});

test('a pixel counts as what most of it is, and an interval without length is one part', () => {
  assert.deepEqual(partsOf(cover, [0, 20], 20), [[0, 20, false]]);
  assert.deepEqual(partsOf(cover, [8, 28], 20), [[8, 20, true]]);
  assert.deepEqual(partsOf(cover, [12, 12], 1), [[12, 0, false]]);
});

test('nothing is covered where nothing computes', () => {
  assert.deepEqual(partsOf(coverOf([], [], []), [3, 9], 2), [[3, 6, false]]);
});
