// Data of a run as a page unpacks it, made by hand.

// Numbers that look random and are the same in every run.
export function chooser(seed) {
  let state = seed;
  return (below) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
}

// Blocks of random sizes and lifetimes, and what is held after each move.
export function randomRun(numMoves, seed = 7) {
  const choose = chooser(seed);
  const life = [];
  const bytes = [];
  const category = [];
  const alive = [];
  const curve = [];
  let held = 0;
  for (let move = 0; move < numMoves; move += 1) {
    if (alive.length && choose(100) < 48) {
      const [{ block, made }] = alive.splice(choose(alive.length), 1);
      life[block] = move - made;
      held -= bytes[block];
    } else {
      alive.push({ block: life.length, made: move });
      life.push(0);
      bytes.push(1 + choose(1000));
      category.push(choose(2));
      held += bytes[bytes.length - 1];
    }
    curve.push(held);
  }
  const meta = { num_moves: numMoves, names: ['one', 'other'], colours: ['parameter', 'other'] };
  const data = { meta, block_life: life, block_kind: life.map((_, block) => block), kind_bytes: bytes };
  return { curve, data: { ...data, kind_category: category, reserved_move: [0, 900], reserved_bytes: [10, 20] } };
}
