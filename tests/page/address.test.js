import assert from 'node:assert/strict';
import { test } from 'node:test';
import { sectionOf } from '../../fakedist/report/page/scripts/address.js';

test('an address is a section, also one of an older page, which kept its views', () => {
  assert.equal(sectionOf('#peak'), 'peak');
  assert.equal(sectionOf('#memory&moves=10-501&block=7'), 'memory');
  assert.equal(sectionOf(''), '');
});
