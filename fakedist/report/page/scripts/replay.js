// The run again without the blocks that advised changes save, as Python's Evidence.saved computes it. Nothing here draws.
//
// Sums are over points: the moves, and the events between two moves at which a change begins or ends. They are in
// Python's order, so the bytes are the same to the last bit.

export class Replay {
  constructor(data, timeline) {
    this.timeline = timeline;
    this.switches = data.meta.switches;
    this.room = data.meta.room;
    this.inner = data.inner_move;
    this.numPoints = timeline.numMoves + this.inner.length;
    this.data = data;
  }

  // For each change its one saving, or the least and the most: the blocks, their bytes, and the points between which
  // they are gone; `whole` are those that are gone for all their lives.
  unpacked(data) {
    const { made, freed, numMoves } = this.timeline;
    this.pointOf = new Int32Array(numMoves + 1);
    for (let move = 0, inner = 0; move <= numMoves; move += 1) {
      while (inner < this.inner.length && this.inner[inner] <= move) inner += 1;
      this.pointOf[move] = move + inner;
    }
    let at = 0;
    const savingOf = (num) => {
      const saving = { whole: [], parts: [] };
      for (let row = 0, block = 0; row < num; row += 1, at += 1) {
        block += data.cut_block[at];
        const bytes = data.cut_values[data.cut_value[at]];
        if (data.cut_end[at]) saving.parts.push({ block, bytes, start: data.cut_start[at], end: data.cut_end[at] });
        else saving.whole.push({ block, bytes, start: this.pointOf[made[block]], end: this.pointOf[freed[block]] });
      }
      return saving;
    };
    return this.switches.map(({ num }) => num.map(savingOf));
  }

  // The switches that cannot be on together with one.
  rivals(number) {
    const own = new Set(this.switches[number].subjects);
    const shares = ({ subjects }) => subjects.some((subject) => own.has(subject));
    return [...this.switches.keys()].filter((at) => at !== number && shares(this.switches[at]));
  }

  // The outcome with these changes, of which some are known only by bounds: the peak if they save the most and the
  // least that they can, the need, and the price.
  run(on) {
    this.cuts ||= this.unpacked(this.data);
    const chosen = [...on].sort((one, other) => one - other);
    const savings = chosen.map((number) => this.cuts[number]).filter((ends) => ends.length);
    const ends = [this.play(savings.map((each) => each[each.length - 1]))];
    if (savings.some((each) => each.length > 1)) ends.push(this.play(savings.map((each) => each[0])));
    ends.sort((one, other) => one.bytes - other.bytes);
    const high = ends[ends.length - 1];
    // Bytes that nothing asked for may go as well, where the outcome is not certain.
    const low = ends.length > 1 ? { ...ends[0], bytes: ends[0].bytes - this.room.rounding } : high;
    const more = chosen.some((number) => this.switches[number].hasOtherBlocks) ? this.room.rounding : 0;
    const most = { ...high, bytes: high.bytes + more };
    const unused = Math.max(this.room.reserved - this.timeline.peak.bytes, 0);
    return { ends, least: low, most, low: low.bytes, high: most.bytes + unused, ...this.price(chosen) };
  }

  // The run without these savings: its peak, the peak's move and bytes by category, and what is held after every move.
  play(savings) {
    const { timeline } = this;
    const gone = this.gone(savings);
    const change = this.change(gone);
    const after = new Float64Array(timeline.numMoves);
    const peak = { bytes: 0, move: 0, point: 0 };
    let held = 0;
    let less = 0;
    for (let move = 0, point = 0, inner = 0; point < this.numPoints; point += 1) {
      const isInner = inner < this.inner.length && this.inner[inner] <= move;
      if (isInner) inner += 1;
      else {
        held += timeline.change(move);
        move += 1;
      }
      less += change[point];
      const now = held - less;
      if (move && (!isInner || now > after[move - 1])) after[move - 1] = now;
      if (now > peak.bytes) Object.assign(peak, { bytes: now, move: Math.max(move - 1, 0), point });
    }
    const bytes = Math.max(Math.ceil(peak.bytes - 1e-3), 0);
    return { bytes, move: peak.move, held: this.held(gone, peak), after };
  }

  // Shares of whole lives multiply, then the first that drops a part of a block's life counts.
  gone(savings) {
    const { block_kind: kind, kind_bytes: size } = this.timeline.data;
    const left = new Float64Array(this.timeline.made.length).fill(1);
    const lives = new Map();
    for (const { whole } of savings) {
      for (const cut of whole) {
        left[cut.block] *= 1 - cut.bytes / Math.max(size[kind[cut.block]], 1);
        lives.set(cut.block, cut);
      }
    }
    const blocks = [...lives.keys()].sort((one, other) => one - other);
    const sizeOf = (block) => size[kind[block]] * (1 - left[block]);
    const rows = [blocks.map((block) => ({ ...lives.get(block), bytes: sizeOf(block) }))];
    const taken = new Set();
    for (const { parts } of savings) {
      const own = parts.filter(({ block }) => !taken.has(block));
      rows.push(own.map((cut) => ({ ...cut, bytes: cut.bytes * left[cut.block] })));
      for (const { block, bytes } of parts) if (bytes > 0) taken.add(block);
    }
    return rows;
  }

  change(gone) {
    const [sum, add, drop] = [0, 0, 0].map(() => new Float64Array(this.numPoints + 1));
    for (const cuts of gone) {
      for (const { start, end, bytes } of cuts) {
        add[start] += bytes;
        drop[end] += bytes;
      }
      for (const cut of cuts) {
        for (const point of [cut.start, cut.end]) {
          sum[point] += add[point] - drop[point];
          add[point] = 0;
          drop[point] = 0;
        }
      }
    }
    return sum;
  }

  // Bytes by category at the peak.
  held(gone, { move, point }) {
    const { timeline } = this;
    const { block_kind: kind, kind_category: category } = timeline.data;
    const state = timeline.state(move);
    for (const { block, start, end, bytes } of gone.flat()) {
      if (start <= point && point < end) state[category[kind[block]]] -= bytes;
    }
    return state;
  }

  // The least and most that the step takes longer, of the changes whose price is known, and the rules of the others.
  price(chosen) {
    const changes = chosen.map((number) => this.switches[number]);
    const priced = changes.filter(({ priceUs }) => priceUs !== null);
    const sum = (end) => priced.reduce((total, { priceUs }) => total + priceUs[end], 0);
    return {
      priceUs: priced.length ? [sum(0), sum(1)] : null,
      spentOn: [...new Set(priced.map(({ spentOn }) => spentOn).filter(Boolean))],
      unpriced: changes.filter(({ priceUs }) => priceUs === null).map(({ rule }) => rule),
    };
  }

  // As Room.fits; empty where that is not known.
  fits({ low, high }) {
    const { room } = this;
    if (room.low === null || room.high === null) return '';
    if (high <= room.low) return 'fits';
    return low <= room.high ? 'may fit' : 'does not fit';
  }
}
