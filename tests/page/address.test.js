import assert from 'node:assert/strict';
import { test } from 'node:test';
import { parse, rangeOf, rangeText, written } from '../../fakedist/report/page/scripts/address.js';

test('a section, views and a block come back from an address', () => {
  const state = {
    section: 'memory',
    values: new Map([
      ['moves', rangeText([10.2, 500.7])],
      ['block', '7'],
    ]),
  };
  const hash = written(state);
  assert.equal(hash, '#memory&moves=10-501&block=7');
  assert.deepEqual(parse(hash), state);
});

test('an address without views is a section alone', () => {
  assert.deepEqual(parse('#peak'), { section: 'peak', values: new Map() });
  assert.deepEqual(parse(''), { section: '', values: new Map() });
});

test('other text gives no range', () => {
  for (const text of [undefined, '', '5', '9-3', '1-2-3', '<b>', '-1-5', '1e3-2e3']) assert.equal(rangeOf(text), null);
  assert.deepEqual(rangeOf('3-9'), [3, 9]);
});
