// The axis that a timeline is drawn along: allocations and frees in order, or a time that belongs to them.

// The last place in a sorted list whose value is at most the wanted one; 0 before the first.
export function lastAtMost(sorted, wanted) {
  let low = 0;
  let high = sorted.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= wanted) low = middle;
    else high = middle;
  }
  return low;
}

function between(from, to, wanted) {
  const last = from.length - 1;
  if (last < 1 || wanted <= from[0]) return to[0] ?? 0;
  if (wanted >= from[last]) return to[last];
  const at = lastAtMost(from, wanted);
  return to[at] + ((wanted - from[at]) * (to[at + 1] - to[at])) / (from[at + 1] - from[at]);
}

export class Axis {
  constructor(name, title, moves, places, suffix = '') {
    Object.assign(this, { name, title, moves, places, suffix });
  }

  // The moves that the axis has a place for.
  get whole() {
    return [this.moves[0], this.moves[this.moves.length - 1]];
  }

  place(move) {
    return between(this.moves, this.places, move);
  }

  move(place) {
    return between(this.places, this.moves, place);
  }
}

function timeAxis(name, what, moves, us) {
  const span = us[us.length - 1] - us[0];
  const [unit, factor] = span >= 1e7 ? ['s', 1e6] : ['ms', 1e3];
  return new Axis(
    name,
    what,
    moves,
    Float64Array.from(us, (each) => each / factor),
    ` ${unit}`,
  );
}

// The axes of a run, the order of its moves first.
export function axesOf(data) {
  const num = Math.max(data.meta.num_moves, 1);
  const found = [new Axis('order', 'allocations and frees, in order', [0, num], [0, num])];
  if (data.wall_move?.length > 1) {
    found.push(timeAxis('wall', 'wall time of the recording', data.wall_move, data.wall_us));
  }
  if (data.step_move?.length > 1) {
    const { step, source } = data.meta.timed;
    found.push(timeAxis('step', `time in step ${step}, ${source}`, data.step_move, data.step_us));
  }
  return found;
}
