import assert from 'node:assert/strict';
import { test } from 'node:test';
import { themed } from '../../fakedist/report/page/scripts/chart.js';
import { csvText } from '../../fakedist/report/page/scripts/copying.js';
import { ranksOf } from '../../fakedist/report/page/scripts/groups.js';
import {
  bytesText,
  cut,
  linesWithin,
  listed,
  plain,
  shortName,
  usText,
} from '../../fakedist/report/page/scripts/text.js';
import { unpackArray } from '../../fakedist/report/page/scripts/unpack.js';

test('bytes are rounded half to even, as in Python', () => {
  const sizes = [0, 1023, 1024, 1152, 2181038080, 2281701376, 2 ** 40 * 1234 + 2 ** 37];
  const texts = ['0 B', '1023 B', '1.00 KiB', '1.12 KiB', '2.03 GiB', '2.12 GiB', '1,234.12 TiB'];
  assert.deepEqual(sizes.map(bytesText), texts);
});

test('times have the unit that fits', () => {
  const texts = ['0 µs', '0 µs', '2.4 µs', '850 µs', '73.0 ms', '12.6 s', '3 min 20 s'];
  assert.deepEqual([0, 0.04, 2.4, 850, 73_000, 12.6e6, 200e6].map(usText), texts);
});

test('names are cut and shortened', () => {
  assert.equal(cut('abcdef', 4), 'abc…');
  assert.equal(shortName('layers.0.attention'), 'attention');
  assert.equal(shortName('(outside of modules)'), '(outside of modules)');
});

test('a text is broken between words, and cut where a word is wider than a line', () => {
  const lines = (text, most) => linesWithin(text, most, ({ length }) => length);
  assert.deepEqual(lines('first refused: 2 GiB', 20), ['first refused: 2 GiB']);
  assert.deepEqual(lines('first refused: 2 GiB', 14), ['first refused:', '2 GiB']);
  assert.deepEqual(lines('50.00 MiB for addmm.default', 10), ['50.00 MiB', 'for addmm.', 'default']);
  assert.deepEqual(lines('for aten.embedding', 6), ['for', 'aten.', 'embed…']);
  assert.deepEqual(lines('ab', 0), ['…']);
});

test('what plotly would read as markup is escaped', () => {
  assert.equal(plain('<a href="x">&</a>'), '&lt;a href="x"&gt;&amp;&lt;/a&gt;');
});

test('ranks are read from every form', () => {
  assert.deepEqual(ranksOf(''), []);
  assert.deepEqual(ranksOf('3'), [3]);
  assert.deepEqual(ranksOf('0-3,8,16-24:4'), [0, 1, 2, 3, 8, 16, 20, 24]);
});

test('a table as CSV keeps commas, quotes and lines', () => {
  const rows = [
    ['a,b', 'say "x"', '-12.5'],
    ['two\nlines', '', '0'],
  ];
  assert.equal(
    csvText(['one', 'two', 'bytes'], rows),
    'one,two,bytes\r\n"a,b","say ""x""",-12.5\r\n"two\nlines",,0\r\n',
  );
});

test('colours of a figure become those of the page, and data stay as they are', () => {
  const x = Float64Array.of(1, 2);
  const names = { '#4573b9': 'c-parameter' };
  const trace = { x, text: ['#4573b9'], line: { color: '#4573b9', width: 1 }, marker: { color: ['#4573b9', 'red'] } };
  const found = themed(trace, names, (name) => `of ${name}`);
  assert.deepEqual(found.line, { color: 'of c-parameter', width: 1 });
  assert.deepEqual(found.marker.color, ['of c-parameter', 'red']);
  assert.deepEqual(found.text, ['#4573b9']);
  assert.equal(found.x, x);
});

test('integers that are stored byte by byte come back', () => {
  const block = Uint8Array.of(0x01, 0xff, 0x02, 0x80, 0, 0, 0, 0).buffer;
  assert.deepEqual([...unpackArray(block, 0, 'u2', 2)], [0x0201, 0x80ff]);
  assert.deepEqual([...unpackArray(block, 0, 'u4', 2)], [0x00000201, 0x000080ff]);
  assert.deepEqual([...unpackArray(block, 0, 'u1', 2)], [0x01, 0xff]);
});

test('items are listed as in a sentence, as in Python', () => {
  assert.equal(listed([]), '');
  assert.equal(listed(['copies', 'all-gathers']), 'copies and all-gathers');
  assert.equal(listed(['copies', 'sends', 'all-gathers']), 'copies, sends and all-gathers');
  assert.equal(listed(['copies', 'sends and receives']), 'copies, and sends and receives');
});
