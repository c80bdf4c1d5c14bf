// Replay every combination of a page's switches: node replayed.js FILE, a file with the page's numbers as base64 text.

import { readFileSync } from 'node:fs';
import { gunzipSync } from 'node:zlib';
import { Replay } from '../../fakedist/report/page/scripts/replay.js';
import { Timeline } from '../../fakedist/report/page/scripts/timeline.js';
import { unpackArray } from '../../fakedist/report/page/scripts/unpack.js';

const block = gunzipSync(Buffer.from(readFileSync(process.argv[2], 'utf-8'), 'base64'));
const bytes = block.buffer.slice(block.byteOffset, block.byteOffset + block.length);
const length = new DataView(bytes).getUint32(0, true);
const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
const data = { meta: header.meta };
for (const [name, [type, at, count]] of Object.entries(header.arrays)) {
  data[name] = unpackArray(bytes, 4 + length + at, type, count);
}
const timeline = new Timeline(data);
const replay = new Replay(data, timeline);
const num = replay.switches.length;
const told = [];
for (let mask = 0; mask < 2 ** num; mask += 1) {
  const on = [...replay.switches.keys()].filter((at) => mask & (1 << at));
  const outcome = replay.run(on);
  const ends = outcome.ends.map(({ bytes, held, after }) => ({
    bytes,
    held: held.reduce((sum, each) => sum + each, 0),
    curve: Math.ceil(Math.max(0, ...after) - 1e-3),
  }));
  told.push({ on, ...outcome, ends, least: undefined, most: undefined, fits: replay.fits(outcome) });
}
console.log(JSON.stringify(told));
