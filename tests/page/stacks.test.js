import assert from 'node:assert/strict';
import { test } from 'node:test';
import { heldByKind, mainCategory, matches, Stacks, treeOf } from '../../fakedist/report/page/scripts/stacks.js';
import { Timeline } from '../../fakedist/report/page/scripts/timeline.js';
import { randomRun } from './runs.js';

// main calls forward, directly and through a library; the last stack is empty.
const meta = { frames: ['job.py:1 (main)', 'torch/nn.py:2 (call)', 'job.py:3 (forward)'], operations: ['mm', 'add'] };
const tree = { node_parent: [0, 1, 2, 1], node_frame: [0, 1, 2, 2], stack_node: [3, 4, 0], frame_library: [0, 1, 0] };
const kinds = { kind_stack: [0, 1, 0, 2], kind_operation: [0, 0, 1, 1], kind_category: [0, 1, 1, 0] };
const data = { meta, ...tree, ...kinds };
const held = { bytes: [10, 20, 5, 1], num: [1, 2, 1, 1] };
const stacks = new Stacks(data);

const plain = (node) => ({
  [node.code < 0 ? 'all' : stacks.text(node.code)]: node.bytes,
  ...(node.children.length && { below: node.children.map(plain) }),
});

test('a stack is read from its innermost call outwards', () => {
  assert.deepEqual(stacks.frames(0), [2, 1, 0]);
  assert.deepEqual(stacks.frames(2), []);
  assert.equal(stacks.depth(false), 3);
  assert.equal(stacks.depth(true), 2);
});

test('callers come first and operations last', () => {
  const found = plain(treeOf(stacks, data, held));
  const [main, alone] = found.below;
  assert.equal(found.all, 36);
  assert.equal(main['job.py:1 (main)'], 35);
  assert.deepEqual(alone, { add: 1 });
  assert.deepEqual(main.below[0], { 'job.py:3 (forward)': 20, below: [{ mm: 20 }] });
});

test('without libraries their callers call what they call', () => {
  const found = plain(treeOf(stacks, data, held, { hideLibraries: true }));
  const [forward] = found.below[0].below;
  assert.deepEqual(forward, { 'job.py:3 (forward)': 35, below: [{ mm: 30 }, { add: 5 }] });
});

test('inverted, an operation is above its callers', () => {
  const root = treeOf(stacks, data, held, { invert: true, hideLibraries: true });
  const found = plain(root);
  assert.deepEqual(
    found.below.map((each) => Object.values(each)[0]),
    [30, 6],
  );
  assert.deepEqual(found.below[0].below, [{ 'job.py:3 (forward)': 30, below: [{ 'job.py:1 (main)': 30 }] }]);
  assert.equal(mainCategory(root.children[0]), 1); // mm: 10 of the one category, 20 of the other
});

test('what is found is counted once, however often a stack has it', () => {
  const root = treeOf(stacks, data, held);
  assert.equal(matches(stacks, root, 'JOB').bytes, 35);
  assert.equal(matches(stacks, root, 'forward').bytes, 35);
  assert.equal(matches(stacks, root, 'torch').bytes, 15);
  assert.equal(matches(stacks, root, 'nothing').bytes, 0);
});

test('held at one moment and not at another are the blocks made between that are alive', () => {
  const { curve, data: run } = randomRun(1_700);
  const timeline = new Timeline(run);
  const sum = ({ bytes }) => bytes.reduce((total, each) => total + each, 0);
  const [a, b] = [1_150, 1_200];
  assert.equal(sum(heldByKind(timeline, b)), curve[b]);
  const { made, freed } = timeline;
  const stays = [...made.keys()].filter((at) => made[at] <= a && freed[at] > b);
  const staying = stays.reduce((total, at) => total + run.kind_bytes[run.block_kind[at]], 0);
  assert.ok(staying > 0 && staying < curve[b]);
  assert.equal(sum(heldByKind(timeline, b, a)), curve[b] - staying);
  // The other way round, those that were freed in between.
  assert.equal(sum(heldByKind(timeline, a, b)), curve[a] - staying);
});

test('boxes below one are made when they are asked for', () => {
  const num = 120_000; // calls, four to a caller
  const parents = Array.from({ length: num }, (_, at) => Math.floor((at + 3) / 4));
  const wide = {
    meta: { frames: Array.from({ length: 1_000 }, (_, at) => `job.py:${at} (f)`), operations: ['mm'] },
    ...{ node_parent: parents, node_frame: parents.map((_, at) => at % 1_000), frame_library: new Uint8Array(1_000) },
    ...{ stack_node: parents.map((_, at) => at + 1), kind_stack: [...parents.keys()] },
    ...{ kind_operation: new Uint8Array(num), kind_category: new Uint8Array(num) },
  };
  const all = { bytes: new Float64Array(num).fill(1), num: new Uint32Array(num).fill(1) };
  const root = treeOf(new Stacks(wide), wide, all);
  assert.equal(root.bytes, num);
  const first = root.children[0];
  assert.equal(first.below, undefined);
  assert.equal(
    first.children.reduce((sum, { bytes }) => sum + bytes, 0),
    first.bytes,
  );
});
