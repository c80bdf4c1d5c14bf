import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Axis, axesOf, lastAtMost } from '../../fakedist/report/page/scripts/axis.js';

test('the last place at or below a value', () => {
  assert.deepEqual(
    [-1, 0, 4, 5, 9, 100].map((wanted) => lastAtMost([0, 5, 9], wanted)),
    [0, 0, 0, 1, 2, 2],
  );
});

test('places and moves are each other there and back', () => {
  const axis = new Axis('wall', '', [0, 10, 30], [0, 1, 5], ' s');
  for (const move of [0, 5, 10, 20, 30]) assert.equal(axis.move(axis.place(move)), move);
  assert.deepEqual([axis.place(-5), axis.place(99)], [0, 5]);
});

test('moves at the same time have one place', () => {
  const axis = new Axis('wall', '', [0, 10, 20], [0, 0, 4]);
  assert.equal(axis.place(7), 0);
  assert.equal(axis.place(15), 2);
});

test('a run offers the axes that it has', () => {
  const meta = { num_moves: 40, timed: { step: 2, source: 'estimated' } };
  assert.deepEqual(
    axesOf({ meta }).map(({ name }) => name),
    ['order'],
  );
  const wall = { wall_move: [0, 40], wall_us: [0, 3e7] };
  const step = { step_move: [20, 30], step_us: [0, 5000] };
  const axes = axesOf({ meta, ...wall, ...step });
  assert.deepEqual(
    axes.map(({ name, suffix }) => name + suffix),
    ['order', 'wall s', 'step ms'],
  );
  assert.deepEqual(axes[2].whole, [20, 30]);
  assert.equal(axes[2].title, 'time in step 2, estimated');
});
