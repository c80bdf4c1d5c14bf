// Of millions of moves, or of tens of thousands of bars, what a view of so many pixels can show.

const AFTER = ['after', 'afterLeast']; // curves of the timeline with changes, if there are any

// The columns of a view of the timeline: one for each move if they fit, otherwise one for each pixel. A column shows the
// moment of the most memory among its moves, so that no peak is lost however thin it is, and the least among them.
export function columnsOf(timeline, axis, [from, to], count) {
  const num = timeline.categories.length;
  const edges = edgesOf(axis, [from, to], count, timeline.numMoves);
  const rows = edges.length - 1;
  const found = {
    num: rows,
    edges,
    place: new Float64Array(rows),
    where: new Int32Array(rows),
    least: new Float64Array(rows),
    total: new Float64Array(rows),
    reserved: new Float64Array(rows),
    held: Array.from({ length: num }, () => new Float64Array(rows)),
    after: timeline.after ? new Float64Array(rows) : null,
    afterLeast: timeline.afterLeast ? new Float64Array(rows) : null,
  };
  const state = new Float64Array(num);
  for (let row = 0; row < rows; row += 1) {
    const range = timeline.range(edges[row], edges[row + 1]);
    found.place[row] = axis.place(edges[row]);
    found.where[row] = range.where;
    found.least[row] = range.least;
    found.total[row] = range.most;
    found.reserved[row] = timeline.reserved(edges[row], edges[row + 1]);
    timeline.state(range.where, state);
    for (let c = 0; c < num; c += 1) found.held[c][row] = state[c];
    for (const name of AFTER) if (found[name]) found[name][row] = mostOf(timeline[name], edges[row], edges[row + 1]);
  }
  return found;
}

function mostOf(values, from, to) {
  let most = values[from];
  for (let at = from + 1; at < to; at += 1) if (values[at] > most) most = values[at];
  return most;
}

// Where columns begin, in whole moves, and where the last one ends.
function edgesOf(axis, [from, to], count, numMoves) {
  const first = Math.max(0, Math.floor(from));
  const last = Math.min(numMoves, Math.max(Math.ceil(to), first + 1));
  if (last - first <= count) return Int32Array.from({ length: last - first + 1 }, (_, at) => first + at);
  const [left, right] = [axis.place(first), axis.place(last)];
  const edges = [first];
  for (let at = 1; at < count; at += 1) {
    const edge = Math.floor(axis.move(left + ((right - left) * at) / count));
    if (edge > edges[edges.length - 1] && edge < last) edges.push(edge);
  }
  edges.push(last);
  return Int32Array.from(edges);
}

// Columns of a part within columns of the whole: those of the whole to its left, then its own, then those to its right.
export function within(whole, part) {
  const from = part.edges[0];
  const to = part.edges[part.num];
  const joined = { ...part };
  const left = whole.edges.findIndex((edge) => edge >= from);
  let right = whole.edges.findIndex((edge) => edge >= to);
  if (right < 0) right = whole.num;
  const join = (of, own) => [...of.subarray(0, left), ...own, ...of.subarray(right, whole.num)];
  const names = ['place', 'least', 'total', 'reserved', ...AFTER.filter((name) => part[name])];
  for (const name of names) joined[name] = join(whole[name], part[name]);
  joined.held = part.held.map((own, c) => join(whole.held[c], own));
  return joined;
}

// Bars of a lane that are in view, as [start, length, bar]. Neighbours that are together narrower than a pixel become
// one, which stands for the longest of them. Bars are in order of their starts and do not overlap.
export function barsInView(start, length, rows, [from, to], pixel) {
  const found = [];
  let last = null;
  let longest = 0;
  for (const row of rows) {
    if (start[row] >= to) break;
    const end = start[row] + length[row];
    if (end < from) continue;
    if (last && end - last[0] < pixel) {
      last[1] = end - last[0];
      if (length[row] > longest) {
        longest = length[row];
        last[2] = row;
      }
      continue;
    }
    last = [start[row], length[row], row];
    longest = length[row];
    found.push(last);
  }
  return found;
}

// Of points that share a pixel, the tallest.
export function tallestInView(places, heights, rows, [from, to], pixel) {
  const found = [];
  let column = -1;
  for (const row of rows) {
    if (places[row] < from || places[row] > to) continue;
    const at = Math.floor(places[row] / pixel);
    if (at !== column) found.push(row);
    else if (heights[row] > heights[found[found.length - 1]]) found[found.length - 1] = row;
    column = at;
  }
  return found;
}
