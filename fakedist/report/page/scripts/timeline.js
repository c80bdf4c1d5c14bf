// The memory at every moment, from two numbers per block. Nothing here draws.
//
// A move is an allocation or a free; moment m is the state after move m. Queries over any range of moments are exact,
// from levels of buckets: a bucket has its least and largest total and the place of the largest, and the lowest buckets
// also have the bytes by category before their first move.

const BUCKET = 64,
  FACTOR = 8;

export class Timeline {
  constructor(data) {
    this.data = data;
    this.numMoves = data.meta.num_moves;
    this.categories = data.meta.names;
    this.colours = data.meta.colours;
    this.order();
    this.build();
  }

  // Blocks are in the order of allocation; a block gives the place of its free, and all other moves are allocations.
  order() {
    const life = this.data.block_life,
      count = life.length;
    this.blockOf = new Int32Array(this.numMoves); // block + 1 where it is allocated, -(block + 1) where it is freed
    this.made = new Int32Array(count);
    this.freed = new Int32Array(count);
    let move = 0;
    for (let block = 0; block < count; block += 1) {
      while (this.blockOf[move] !== 0) move += 1;
      this.blockOf[move] = block + 1;
      this.made[block] = move;
      this.freed[block] = life[block] ? move + life[block] : this.numMoves;
      if (life[block]) this.blockOf[move + life[block]] = -block - 1;
    }
  }

  build() {
    const { block_kind: kind, kind_bytes: bytes, kind_category: category } = this.data;
    const width = this.categories.length,
      count = Math.ceil(this.numMoves / BUCKET);
    this.before = new Float64Array(count * width);
    let level = newLevel(count);
    const now = new Float64Array(width);
    let total = 0;
    this.peak = { move: -1, bytes: 0 };
    for (let bucket = 0; bucket < count; bucket += 1) {
      this.before.set(now, bucket * width);
      const end = Math.min((bucket + 1) * BUCKET, this.numMoves);
      let most = -1,
        where = 0,
        least = Infinity;
      for (let move = bucket * BUCKET; move < end; move += 1) {
        const which = this.blockOf[move],
          of = kind[which > 0 ? which - 1 : -which - 1];
        const change = which > 0 ? bytes[of] : -bytes[of];
        now[category[of]] += change;
        total += change;
        if (total > most) {
          most = total;
          where = move;
        }
        if (total < least) least = total;
      }
      level.most[bucket] = most;
      level.where[bucket] = where;
      level.least[bucket] = least;
      if (most > this.peak.bytes) this.peak = { move: where, bytes: most };
    }
    this.levels = [level];
    while (level.most.length > 1) {
      level = coarser(level);
      this.levels.push(level);
    }
  }

  // The largest total in [from, to), where it is, and the least.
  range(from, to) {
    const found = { most: -1, where: from, least: Infinity };
    let at = from;
    const next = Math.min(to, Math.ceil(from / BUCKET) * BUCKET);
    if (at < next) {
      this.scan(at, next, found);
      at = next;
    }
    while (at < to) {
      let level = -1,
        size = BUCKET;
      while (level + 1 < this.levels.length && at % size === 0 && at + size <= to) {
        level += 1;
        size *= FACTOR;
      }
      if (level < 0) {
        this.scan(at, to, found);
        break;
      }
      const { most, where, least } = this.levels[level],
        bucket = at / (size / FACTOR);
      if (most[bucket] > found.most) {
        found.most = most[bucket];
        found.where = where[bucket];
      }
      if (least[bucket] < found.least) found.least = least[bucket];
      at += size / FACTOR;
    }
    return found;
  }

  scan(from, to, found) {
    const bucket = Math.floor(from / BUCKET),
      width = this.categories.length;
    let total = 0;
    for (let c = 0; c < width; c += 1) total += this.before[bucket * width + c];
    for (let move = bucket * BUCKET; move < to; move += 1) {
      total += this.change(move);
      if (move < from) continue;
      if (total > found.most) {
        found.most = total;
        found.where = move;
      }
      if (total < found.least) found.least = total;
    }
  }

  change(move) {
    const which = this.blockOf[move];
    return which > 0
      ? this.data.kind_bytes[this.data.block_kind[which - 1]]
      : -this.data.kind_bytes[this.data.block_kind[-which - 1]];
  }

  // Bytes by category after a move.
  state(move, into = new Float64Array(this.categories.length)) {
    const width = this.categories.length,
      bucket = Math.floor(move / BUCKET);
    const { block_kind: kind, kind_bytes: bytes, kind_category: category } = this.data;
    for (let c = 0; c < width; c += 1) into[c] = this.before[bucket * width + c];
    for (let at = bucket * BUCKET; at <= move; at += 1) {
      const which = this.blockOf[at],
        of = kind[which > 0 ? which - 1 : -which - 1];
      into[category[of]] += which > 0 ? bytes[of] : -bytes[of];
    }
    return into;
  }

  // The block of a category at a number of bytes above the category's floor at a moment, and the bytes below it.
  blockAt(move, wanted, height) {
    const { block_kind: kind, kind_bytes: bytes, kind_category: category } = this.data;
    let below = 0;
    for (let block = 0; block < this.made.length && this.made[block] <= move; block += 1) {
      if (this.freed[block] <= move) continue;
      const of = kind[block];
      if (category[of] !== wanted) continue;
      if (below + bytes[of] > height) return { block, below };
      below += bytes[of];
    }
    return { block: -1, below: -1 };
  }

  block(number) {
    const { data } = this,
      of = data.block_kind[number];
    return {
      number,
      bytes: data.kind_bytes[of],
      category: this.categories[data.kind_category[of]],
      layer: ownerOf(data, number),
      operation: data.meta.operations[data.kind_operation[of]] || '',
      line: data.meta.lines[data.kind_line[of]] || '',
      stack: data.kind_stack[of],
      made: this.made[number],
      freed: this.freed[number],
    };
  }

  // Step and phase of a moment.
  span(move) {
    const { span_move: first, span_step: step, span_phase: phase, meta } = this.data;
    if (!first?.length) return null;
    let low = 0,
      high = first.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (first[middle] <= move) low = middle;
      else high = middle;
    }
    return { number: low, step: step[low], phase: meta.phases[phase[low]] };
  }

  // Largest reserved bytes in [from, to).
  reserved(from, to) {
    const { reserved_move: at, reserved_bytes: bytes } = this.data;
    let low = -1,
      high = at.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (at[middle] <= from) low = middle;
      else high = middle;
    }
    let most = low >= 0 ? bytes[low] : 0;
    for (let i = low + 1; i < at.length && at[i] < to; i += 1) most = Math.max(most, bytes[i]);
    return most;
  }
}

// The text of a block's owner: a layer, or, beyond the last layer, what several layers share.
export function ownerOf({ meta, block_kind: kind, kind_layer: layer }, block) {
  const number = layer[kind[block]];
  return meta.layers[number] || (meta.owners || [])[number - meta.layers.length] || '(outside of modules)';
}

function newLevel(count) {
  return { most: new Float64Array(count), where: new Int32Array(count), least: new Float64Array(count) };
}

function coarser(below) {
  const count = below.most.length,
    level = newLevel(Math.ceil(count / FACTOR));
  for (let bucket = 0; bucket < level.most.length; bucket += 1) {
    let most = -1,
      where = 0,
      least = Infinity;
    for (let child = bucket * FACTOR; child < Math.min(count, (bucket + 1) * FACTOR); child += 1) {
      if (below.most[child] > most) {
        most = below.most[child];
        where = below.where[child];
      }
      if (below.least[child] < least) least = below.least[child];
    }
    level.most[bucket] = most;
    level.where[bucket] = where;
    level.least[bucket] = least;
  }
  return level;
}
