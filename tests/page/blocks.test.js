import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Axis } from '../../fakedist/report/page/scripts/axis.js';
import { areaOf, areasOf, floorsOf, outline } from '../../fakedist/report/page/scripts/blocks.js';
import { columnsOf } from '../../fakedist/report/page/scripts/sampling.js';
import { Timeline } from '../../fakedist/report/page/scripts/timeline.js';
import { randomRun } from './runs.js';

const { data } = randomRun(1_700);
const timeline = new Timeline(data);
const axis = new Axis('order', '', [0, 1_700], [0, 1_700]);
const columns = columnsOf(timeline, axis, [300, 700], 400);

// The floor of an area in a column.
const floorIn = ({ columns: at, floors }, column) => floors[at.filter((each) => each <= column).length - 1];

test('areas of a column lie on each other and reach the total', () => {
  const areas = areasOf(timeline, columns, 0, 1e9);
  for (const column of [0, 1, 57, 200, 399]) {
    const here = areas.filter((each) => each.columns[0] <= column && column < each.end);
    const sorted = here.map((each) => [floorIn(each, column), each.bytes]).sort((one, other) => one[0] - other[0]);
    let top = 0;
    for (const [floor, bytes] of sorted) {
      assert.equal(floor, top);
      top += bytes;
    }
    assert.equal(top, columns.total[column]);
  }
});

test('the floors of one block are those of its area', () => {
  const areas = areasOf(timeline, columns, 0, 1e9);
  for (const area of areas) {
    const { first, floors } = floorsOf(timeline, columns, area.block);
    const own = areaOf({ first, floors }, area.bytes);
    assert.deepEqual([own.columns, own.floors, own.end], [area.columns, area.floors, area.end]);
  }
});

test('a pointer at an area finds its block', () => {
  for (const area of areasOf(timeline, columns, 500, 1e9)) {
    const [column, floor] = [area.columns[0], area.floors[0]];
    const below = area.category ? columns.held[0][column] : 0;
    assert.equal(timeline.blockAt(columns.where[column], area.category, floor - below).block, area.block);
  }
});

test('blocks that are too many, or in columns of many moves, are not drawn', () => {
  assert.equal(areasOf(timeline, columns, 0, 50), null);
  assert.equal(areasOf(timeline, columnsOf(timeline, axis, [0, 1_700], 100), 0, 1e9), null);
  assert.ok(areasOf(timeline, columns, 900, 1e9).every(({ bytes }) => bytes >= 900));
});

test('an outline goes along the floor and back along the top', () => {
  const area = { columns: [2, 5], floors: [10, 4], bytes: 3, end: 7 };
  assert.equal(
    outline(
      area,
      (column) => column,
      (bytes) => bytes,
    ),
    'M2 10H5V4H7V7H5V13H2Z',
  );
});
