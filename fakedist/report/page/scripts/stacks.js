// The stacks of blocks, and the tree of what was allocated by them. Nothing here draws.

export class Stacks {
  constructor(data) {
    this.parent = data.node_parent; // of node 1 and up: its caller, 0 for none
    this.frame = data.node_frame;
    this.leaf = data.stack_node;
    this.library = data.frame_library;
    this.texts = data.meta.frames;
    this.operations = data.meta.operations;
  }

  // What each node calls: those of node n are calls[first[n]] up to calls[first[n + 1]]; node 0 is the root.
  get called() {
    if (this.calledBy) return this.calledBy;
    const { parent } = this;
    const first = new Uint32Array(parent.length + 2);
    for (const caller of parent) first[caller + 1] += 1;
    for (let node = 0; node <= parent.length; node += 1) first[node + 1] += first[node];
    const next = first.slice();
    const calls = new Uint32Array(parent.length);
    for (let at = 0; at < parent.length; at += 1) {
      calls[next[parent[at]]] = at + 1;
      next[parent[at]] += 1;
    }
    this.calledBy = { first, calls };
    return this.calledBy;
  }

  // The frames of a stack, innermost first.
  frames(stack) {
    const found = [];
    for (let node = this.leaf[stack]; node > 0; node = this.parent[node - 1]) found.push(this.frame[node - 1]);
    return found;
  }

  // Calls of the deepest stack.
  depth(hideLibraries) {
    const depth = new Uint16Array(this.parent.length + 1);
    let most = 0;
    for (let at = 0; at < this.parent.length; at += 1) {
      depth[at + 1] = depth[this.parent[at]] + !(hideLibraries && this.library[this.frame[at]]);
      most = Math.max(most, depth[at + 1]);
    }
    return most;
  }

  // What a node of the tree stands for: a frame, or, beyond the last frame, an operation.
  text(code) {
    return code < this.texts.length ? this.texts[code] : this.operations[code - this.texts.length] || '(no operation)';
  }

  isLibrary(code) {
    return code < this.texts.length && this.library[code] === 1;
  }
}

// For each kind of block the bytes and the number of those that are held at a moment, and were not at an earlier one.
export function heldByKind(timeline, at, since = -1) {
  const { block_kind: kind, kind_bytes: size } = timeline.data;
  const bytes = new Float64Array(size.length);
  const num = new Uint32Array(size.length);
  const { made, freed } = timeline;
  for (let block = 0; block < made.length; block += 1) {
    if (made[block] > at || freed[block] <= at) continue;
    if (since >= 0 && made[block] <= since && since < freed[block]) continue;
    bytes[kind[block]] += size[kind[block]];
    num[kind[block]] += 1;
  }
  return { bytes, num };
}

// A box of the graph: callers, or operations. The boxes below it, largest first, are made when they are asked for, so
// that what is narrower than a pixel costs nothing.
class Box {
  constructor(tree, parent, code, members = []) {
    Object.assign(this, { tree, parent, code, members, bytes: 0, num: 0, held: null });
  }

  get children() {
    this.below ||= this.tree.below(this).sort((one, other) => other.bytes - one.bytes);
    return this.below;
  }
}

// The boxes below one, by code.
class Boxes {
  constructor(tree, parent) {
    Object.assign(this, { tree, parent, of: new Map() });
  }

  add(code, bytes, num) {
    let box = this.of.get(code);
    if (!box) {
      box = new Box(this.tree, this.parent, code);
      this.of.set(code, box);
    }
    box.bytes += bytes;
    box.num += num;
    return box;
  }

  addOperation(kind) {
    const { data, held, stacks } = this.tree;
    const box = this.add(stacks.texts.length + data.kind_operation[kind], held.bytes[kind], held.num[kind]);
    const category = data.kind_category[kind];
    box.held ||= new Map();
    box.held.set(category, (box.held.get(category) || 0) + held.bytes[kind]);
    return box;
  }
}

class Tree {
  constructor(stacks, data, held, hideLibraries) {
    Object.assign(this, { stacks, data, held, hideLibraries });
    this.kinds = [...held.num.keys()].filter((kind) => held.num[kind]);
    this.root = new Box(this, null, -1);
    for (const kind of this.kinds) {
      this.root.bytes += held.bytes[kind];
      this.root.num += held.num[kind];
    }
  }

  isShown(frame) {
    return !(this.hideLibraries && this.stacks.library[frame]);
  }

  leafOf(kind) {
    return this.stacks.leaf[this.data.kind_stack[kind]];
  }
}

// Callers above, what they call below, the operations last. Members of a box are nodes of the stacks' own tree.
class Callers extends Tree {
  constructor(...args) {
    super(...args);
    const { parent } = this.stacks;
    this.bytes = new Float64Array(parent.length + 1);
    this.num = new Uint32Array(parent.length + 1);
    this.ends = new Map(); // kinds by the node at which their stacks end
    for (const kind of this.kinds) {
      const leaf = this.leafOf(kind);
      this.bytes[leaf] += this.held.bytes[kind];
      this.num[leaf] += this.held.num[kind];
      if (!this.ends.has(leaf)) this.ends.set(leaf, []);
      this.ends.get(leaf).push(kind);
    }
    // Callers come before what they call.
    for (let node = parent.length; node > 0; node -= 1) {
      this.bytes[parent[node - 1]] += this.bytes[node];
      this.num[parent[node - 1]] += this.num[node];
    }
    this.root.members.push(0);
  }

  below(box) {
    const { stacks, bytes, num } = this;
    const { first, calls } = stacks.called;
    const found = new Boxes(this, box);
    const todo = [...box.members];
    while (todo.length) {
      const caller = todo.pop();
      for (const kind of this.ends.get(caller) || []) found.addOperation(kind);
      for (let at = first[caller]; at < first[caller + 1]; at += 1) {
        const node = calls[at];
        const frame = stacks.frame[node - 1];
        if (!num[node]) continue;
        if (this.isShown(frame)) found.add(frame, bytes[node], num[node]).members.push(node);
        else todo.push(node);
      }
    }
    return [...found.of.values()];
  }
}

// The operations first, and their callers below. Members of a box are kinds, each with the node of its next caller.
class Operations extends Tree {
  below(box) {
    const { stacks, held } = this;
    const found = new Boxes(this, box);
    if (!box.parent) for (const kind of this.kinds) found.addOperation(kind).members.push([kind, this.leafOf(kind)]);
    for (const [kind, next] of box.members) {
      let node = next;
      while (node && !this.isShown(stacks.frame[node - 1])) node = stacks.parent[node - 1];
      if (!node) continue;
      const caller = found.add(stacks.frame[node - 1], held.bytes[kind], held.num[kind]);
      caller.members.push([kind, stacks.parent[node - 1]]);
    }
    return [...found.of.values()];
  }
}

// The outermost box of the graph.
export function treeOf(stacks, data, held, { hideLibraries = false, invert = false } = {}) {
  return new (invert ? Operations : Callers)(stacks, data, held, hideLibraries).root;
}

// The category that holds most of an operation's bytes.
export function mainCategory(node) {
  let [main, most] = [-1, -1];
  for (const [category, bytes] of node.held || []) if (bytes > most) [main, most] = [category, bytes];
  return main;
}

// Bytes whose operation or any call has the wanted text, and which codes do.
export function matches(stacks, { tree }, wanted) {
  const text = wanted.toLowerCase();
  const fits = new Map();
  const isHit = (code) => {
    if (code < 0) return false;
    if (!fits.has(code)) fits.set(code, stacks.text(code).toLowerCase().includes(text));
    return fits.get(code);
  };
  const { parent, frame } = stacks;
  const inside = new Uint8Array(parent.length + 1);
  for (let node = 1; node <= parent.length; node += 1) {
    const of = frame[node - 1];
    inside[node] = inside[parent[node - 1]] || (tree.isShown(of) && isHit(of)) ? 1 : 0;
  }
  let bytes = 0;
  for (const kind of tree.kinds) {
    const operation = stacks.texts.length + tree.data.kind_operation[kind];
    if (inside[tree.leafOf(kind)] || isHit(operation)) bytes += tree.held.bytes[kind];
  }
  return { bytes, isHit };
}
