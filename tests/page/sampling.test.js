import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Axis } from '../../fakedist/report/page/scripts/axis.js';
import { barsInView, columnsOf, tallestInView, within } from '../../fakedist/report/page/scripts/sampling.js';
import { Timeline } from '../../fakedist/report/page/scripts/timeline.js';
import { randomRun } from './runs.js';

const { curve, data } = randomRun(1_700);
const timeline = new Timeline(data);
const order = new Axis('order', '', [0, 1_700], [0, 1_700]);

test('the peak is drawn however few columns there are', () => {
  for (const count of [1, 3, 50, 600]) {
    const columns = columnsOf(timeline, order, [0, 1_700], count);
    assert.ok(columns.num <= count);
    assert.equal(Math.max(...columns.total), timeline.peak.bytes);
  }
});

test('columns show the categories at their largest moment, and the least among their moves', () => {
  const columns = columnsOf(timeline, order, [200, 1_000], 80);
  for (let row = 0; row < columns.num; row += 1) {
    const part = curve.slice(columns.edges[row], columns.edges[row + 1]);
    assert.equal(columns.total[row], Math.max(...part));
    assert.equal(columns.least[row], Math.min(...part));
    assert.equal(columns.held[0][row] + columns.held[1][row], columns.total[row]);
  }
});

test('a view of few moves has a column for each', () => {
  const columns = columnsOf(timeline, order, [100, 130], 600);
  assert.deepEqual([...columns.total], curve.slice(100, 130));
  assert.deepEqual(
    [...columns.place],
    Array.from({ length: 30 }, (_, at) => 100 + at),
  );
});

test('columns along a time are equally wide in time', () => {
  // The first half of the moves takes a tenth of the time.
  const time = new Axis('wall', '', [0, 850, 1_700], [0, 10, 100], ' ms');
  const columns = columnsOf(timeline, time, [0, 1_700], 100);
  const early = columns.place.filter((place) => place < 10).length;
  assert.ok(early >= 9 && early <= 11, `${early}`);
  assert.equal(Math.max(...columns.total), timeline.peak.bytes);
});

test('a part within the whole replaces its columns and no others', () => {
  const whole = columnsOf(timeline, order, [0, 1_700], 100);
  const part = columnsOf(timeline, order, [500, 600], 600);
  const joined = within(whole, part);
  assert.deepEqual(
    [...joined.place],
    [...joined.place].sort((a, b) => a - b),
  );
  assert.equal(new Set(joined.place).size, joined.place.length);
  const inside = joined.place
    .map((place, row) => [place, joined.total[row]])
    .filter(([place]) => place >= 500 && place < 600);
  assert.deepEqual(
    inside.map(([, total]) => total),
    curve.slice(500, 600),
  );
  assert.equal(joined.held[0].length, joined.place.length);
  assert.equal(joined.place[0], 0);
});

test('bars that share a pixel become the longest of them, and wide bars stay', () => {
  const start = [0, 1, 2, 10, 40];
  const length = [0.2, 0.8, 0.1, 20, 5];
  const found = barsInView(start, length, [0, 1, 2, 3, 4], [0, 100], 3);
  assert.deepEqual(found, [
    [0, 2.1, 1],
    [10, 20, 3],
    [40, 5, 4],
  ]);
});

test('bars out of view are left out, and those that reach into it are not', () => {
  assert.deepEqual(barsInView([0, 10, 40], [5, 20, 5], [0, 1, 2], [15, 35], 1), [[10, 20, 1]]);
});

test('of calls that share a pixel the tallest is drawn', () => {
  assert.deepEqual(tallestInView([0, 1, 2, 11, 50], [1, 9, 3, 1, 4], [0, 1, 2, 3, 4], [0, 20], 10), [1, 3]);
});
