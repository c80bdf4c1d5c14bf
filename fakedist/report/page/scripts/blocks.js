// Blocks as areas of the timeline: each lies on those of its category that were allocated before it. Nothing here draws.

// The floors of one block in the columns in which it is held: the first column, and the bytes below it in each.
export function floorsOf(timeline, { num, where, held }, number) {
  const { block_kind: kind, kind_bytes: bytes, kind_category: category } = timeline.data;
  const { made, freed } = timeline;
  const own = category[kind[number]];
  const first = columnAt(where, num, made[number]);
  const end = columnAt(where, num, freed[number]);
  const change = new Float64Array(Math.max(end - first, 0) + 1);
  if (end <= first) return { first, floors: [] };
  for (let block = 0; block < number; block += 1) {
    const of = kind[block];
    if (category[of] !== own || freed[block] <= where[first] || made[block] > where[end - 1]) continue;
    change[Math.max(columnAt(where, num, made[block]) - first, 0)] += bytes[of];
    change[Math.min(columnAt(where, num, freed[block]) - first, end - first)] -= bytes[of];
  }
  const floors = new Float64Array(end - first);
  let below = 0;
  for (let at = 0; at < floors.length; at += 1) {
    below += change[at];
    floors[at] = below;
    for (let c = 0; c < own; c += 1) floors[at] += held[c][first + at];
  }
  return { first, floors };
}

// The first column whose moment is not before a move.
function columnAt(where, num, move) {
  let low = 0;
  let high = num;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (where[middle] < move) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The areas of all blocks of a size that can be seen, in columns of one move each: from a column to another, on floors
// that begin at columns. Null if they have too many corners to draw.
export function areasOf(timeline, columns, leastBytes, mostCorners) {
  const { edges, num, where } = columns;
  if (edges[num] - edges[0] !== num) return null;
  const view = new Areas(timeline, leastBytes);
  for (let block = 0; block < timeline.made.length && timeline.made[block] <= where[0]; block += 1) {
    if (timeline.freed[block] > where[0]) view.add(block);
  }
  view.lift(0, 0, 0);
  for (let column = 1; column < num && view.corners <= mostCorners; column += 1) {
    const which = timeline.blockOf[where[column]];
    if (which > 0) view.lift(...view.add(which - 1), column);
    else view.lift(...view.drop(-which - 1, column), column);
  }
  for (const area of view.found) area.end ??= num;
  return view.corners <= mostCorners ? view.found : null;
}

class Areas {
  constructor(timeline, leastBytes) {
    const { block_kind: kind, kind_bytes: bytes, kind_category: category } = timeline.data;
    this.bytesOf = (block) => bytes[kind[block]];
    this.categoryOf = (block) => category[kind[block]];
    this.leastBytes = leastBytes;
    this.stacks = timeline.categories.map(() => []); // of each category the blocks that are held, and their areas
    this.sums = timeline.categories.map(() => 0);
    this.found = [];
    this.corners = 0;
  }

  // Where a block is now: its category, and its position there.
  add(block) {
    const [category, bytes] = [this.categoryOf(block), this.bytesOf(block)];
    const area = bytes >= this.leastBytes ? { block, category, bytes, columns: [], floors: [] } : null;
    this.stacks[category].push({ block, bytes, area });
    this.sums[category] += bytes;
    if (area) this.found.push(area);
    return [category, this.stacks[category].length - 1];
  }

  drop(block, column) {
    const category = this.categoryOf(block);
    const stack = this.stacks[category];
    const at = stack.findIndex((each) => each.block === block);
    const [{ area, bytes }] = stack.splice(at, 1);
    this.sums[category] -= bytes;
    if (area) area.end = column;
    return [category, at];
  }

  // Put all areas from one position of a category upwards on their floors.
  lift(category, position, column) {
    let floor = this.sums.slice(0, category).reduce((sum, bytes) => sum + bytes, 0);
    for (let at = 0; at < position; at += 1) floor += this.stacks[category][at].bytes;
    for (let c = category; c < this.stacks.length; c += 1) {
      const stack = this.stacks[c];
      for (let at = c === category ? position : 0; at < stack.length; at += 1) {
        const { area, bytes } = stack[at];
        if (area && area.floors[area.floors.length - 1] !== floor) {
          area.columns.push(column);
          area.floors.push(floor);
          this.corners += 1;
        }
        floor += bytes;
      }
    }
  }
}

// The outline of an area as the path of a picture: along its floor, and back along its top.
export function outline({ columns, floors, bytes, end }, x, y) {
  const last = columns.length - 1;
  const parts = [`M${x(columns[0])} ${y(floors[0])}`];
  for (let at = 1; at <= last; at += 1) parts.push(`H${x(columns[at])}V${y(floors[at])}`);
  parts.push(`H${x(end)}V${y(floors[last] + bytes)}`);
  for (let at = last; at > 0; at -= 1) parts.push(`H${x(columns[at])}V${y(floors[at - 1] + bytes)}`);
  parts.push(`H${x(columns[0])}Z`);
  return parts.join('');
}

// Floors of consecutive columns, without those that repeat the one before.
export function areaOf({ first, floors }, bytes) {
  const area = { columns: [], floors: [], bytes, end: first + floors.length };
  floors.forEach((floor, at) => {
    if (at && floor === floors[at - 1]) return;
    area.columns.push(first + at);
    area.floors.push(floor);
  });
  return area;
}
