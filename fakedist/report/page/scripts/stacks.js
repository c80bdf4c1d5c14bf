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

// Callers above, what they call below, the operations last; inverted, the operations first and their callers below.
export function treeOf(stacks, data, { bytes, num }, { hideLibraries = false, invert = false } = {}) {
  const { kind_stack: stack, kind_operation: operation, kind_category: category } = data;
  const nodes = [];
  const numbers = new Map(); // by caller and code
  const numCodes = stacks.texts.length + stacks.operations.length + 1;
  const below = (parent, code) => {
    const key = (parent ? parent.number + 1 : 0) * numCodes + code + 1;
    let node = numbers.get(key);
    if (node) return node;
    node = { number: nodes.length, code, parent, bytes: 0, num: 0, children: [], held: null };
    numbers.set(key, node);
    nodes.push(node);
    parent?.children.push(node);
    return node;
  };
  const root = below(null, -1);
  const shown = (frame) => !(hideLibraries && stacks.library[frame]);
  const placed = [root];
  const place = (call) => {
    const way = [];
    for (let at = call; !placed[at]; at = stacks.parent[at - 1]) way.push(at);
    for (const at of way.reverse()) {
      const caller = placed[stacks.parent[at - 1]];
      const frame = stacks.frame[at - 1];
      placed[at] = shown(frame) ? below(caller, frame) : caller;
    }
    return placed[call];
  };
  for (let kind = 0; kind < bytes.length; kind += 1) {
    if (!num[kind]) continue;
    const leaf = stacks.texts.length + operation[kind];
    const named = invert ? below(root, leaf) : below(place(stacks.leaf[stack[kind]]), leaf);
    const last = invert ? stacks.frames(stack[kind]).filter(shown).reduce(below, named) : named;
    last.bytes += bytes[kind];
    last.num += num[kind];
    named.held ||= new Map();
    named.held.set(category[kind], (named.held.get(category[kind]) || 0) + bytes[kind]);
  }
  // Callers come before what they call.
  for (let at = nodes.length - 1; at > 0; at -= 1) {
    const { parent, bytes: own, num: count } = nodes[at];
    parent.bytes += own;
    parent.num += count;
  }
  return root;
}

// The category that holds most of an operation's bytes.
export function mainCategory(node) {
  let [main, most] = [-1, -1];
  for (const [category, bytes] of node.held || []) if (bytes > most) [main, most] = [category, bytes];
  return main;
}

// Bytes below the outermost nodes whose text has the wanted one, and these nodes.
export function matches(stacks, root, wanted) {
  const text = wanted.toLowerCase();
  const fits = new Map();
  const isHit = (code) => {
    if (code < 0) return false;
    if (!fits.has(code)) fits.set(code, stacks.text(code).toLowerCase().includes(text));
    return fits.get(code);
  };
  let bytes = 0;
  const visit = (node, inside) => {
    const hit = isHit(node.code);
    if (hit && !inside) bytes += node.bytes;
    for (const child of node.children) visit(child, inside || hit);
  };
  visit(root, false);
  return { bytes, isHit };
}
