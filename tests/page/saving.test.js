import assert from 'node:assert/strict';
import { test } from 'node:test';
import { pictureName, svgOfBoxes } from '../../fakedist/report/page/scripts/saving.js';

test('a picture is named after its run and its chart, whatever they are called', () => {
  assert.equal(pictureName('run 1', 'timeline'), 'run-1-timeline');
  assert.equal(pictureName('../<script>', 'group-"tp"'), 'script--group--tp');
});

test('texts of boxes stay text and are cut at their boxes', () => {
  const box = { x: 0, y: 0, width: 40, height: 20, colour: '#abcdef', text: '<&>a' };
  const narrow = { ...box, width: 3 };
  const svg = svgOfBoxes({ width: 50, height: 20, boxes: [box, narrow], paper: '#fff', ink: '#000', font: '"a"' });
  assert.ok(svg.includes('>&lt;&amp;&gt;a</text>'));
  assert.ok(svg.includes('font-family="&quot;a&quot;"'));
  assert.equal(svg.match(/<text/g).length, 1);
});
