import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Timeline } from '../../fakedist/report/page/scripts/timeline.js';
import { chooser, randomRun } from './runs.js';

const { curve, data } = randomRun(1_700);
const timeline = new Timeline(data);

test('the state after every move adds up to what is held', () => {
  const totals = curve.map((_, move) => timeline.state(move).reduce((sum, bytes) => sum + bytes, 0));
  assert.deepEqual(totals, curve);
});

test('any stretch knows its largest and its least moment', () => {
  const choose = chooser(3);
  // Whole buckets of 64 moves and of 8 times as many, and stretches that cut them.
  const stretches = [
    [0, 1700],
    [64, 128],
    [0, 512],
    [512, 1536],
    [100, 101],
  ];
  for (let at = 0; at < 500; at += 1) {
    const from = choose(1_699);
    stretches.push([from, from + 1 + choose(1_700 - from)]);
  }
  assert.ok(timeline.levels.length > 1);
  for (const [from, to] of stretches) {
    const part = curve.slice(from, to);
    const most = Math.max(...part);
    const expected = { most, where: from + part.indexOf(most), least: Math.min(...part) };
    assert.deepEqual(timeline.range(from, to), expected);
  }
});

test('the peak is the largest moment of all', () => {
  const bytes = Math.max(...curve);
  assert.deepEqual(timeline.peak, { move: curve.indexOf(bytes), bytes });
});

test('reserved memory is the most of a stretch, and stays until it changes', () => {
  assert.equal(timeline.reserved(5, 6), 10);
  assert.equal(timeline.reserved(5, 901), 20);
  assert.equal(timeline.reserved(1_000, 1_001), 20);
});

test('a block lies where its category and the blocks below it leave it', () => {
  const { move } = timeline.peak;
  const own = data.block_life.map((life, block) => ({
    block,
    made: timeline.made[block],
    freed: timeline.freed[block],
    life,
  }));
  const alive = own.filter(({ block, made, freed }) => made <= move && move < freed && data.kind_category[block] === 1);
  let floor = 0;
  for (const { block } of alive) {
    assert.equal(timeline.blockAt(move, 1, floor).block, block);
    floor += data.kind_bytes[block];
  }
  assert.equal(timeline.blockAt(move, 1, floor).block, -1);
});
