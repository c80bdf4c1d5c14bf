// Which parts of a collective something computes in.

import { lastAtMost } from './axis.js';

// Where any of some bars runs, as disjoint intervals in order; `before` is how much time the ones before each cover.
export function coverOf(start, length, bars) {
  const [from, to, before] = [[], [], [0]];
  for (const bar of [...bars].sort((a, b) => start[a] - start[b])) {
    const end = start[bar] + length[bar];
    const last = to.length - 1;
    if (last >= 0 && start[bar] <= to[last]) to[last] = Math.max(to[last], end);
    else {
      from.push(start[bar]);
      to.push(end);
    }
  }
  from.forEach((at, row) => {
    before.push(before[row] + to[row] - at);
  });
  return { from, to, before };
}

// How much of the time before a moment is covered.
export function coveredBefore({ from, to, before }, at) {
  if (!from.length || at <= from[0]) return 0;
  const row = lastAtMost(from, at);
  return before[row] + Math.min(at, to[row]) - from[row];
}

// An interval in parts that are covered or not, as [start, length, isCovered]. A pixel is covered if most of it is.
export function partsOf(cover, [from, to], pixel) {
  const parts = [];
  let before = coveredBefore(cover, from);
  for (let left = from; left < to || !parts.length; left += pixel) {
    const right = Math.min(left + pixel, to);
    const until = coveredBefore(cover, right);
    const isCovered = until - before > (right - left) / 2;
    const last = parts[parts.length - 1];
    if (last && last[2] === isCovered) last[1] = right - last[0];
    else parts.push([left, right - left, isCovered]);
    before = until;
  }
  return parts;
}
