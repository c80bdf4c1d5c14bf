// The peak by layer and category, as nested areas (treemap) or as rows below each other (icicle).

class LayerTree {
  constructor(data) {
    const { meta } = data, names = meta.layers;
    this.nodes = names.map((name, at) => ({ at, name: at ? name : '(outside of modules)', short: at ? shortName(name) : '(outside of modules)', parts: [], children: [], bytes: 0 }));
    this.root = { at: -1, name: 'the peak', short: 'the peak', parts: [], children: [], bytes: 0 };
    for (let at = names.length - 1; at >= 0; at -= 1) {
      const node = this.nodes[at];
      for (const category of meta.categories) {
        const bytes = data[`layer_${category}`][at];
        if (bytes) { node.parts.push({ category, bytes, of: node }); node.bytes += bytes; }
      }
      const above = data.layer_parent[at]; // a row, plus one; row 0 is outside of modules and no layer's parent
      node.parent = above > 1 ? this.nodes[above - 1] : this.root;
      node.parent.bytes += node.bytes;
      if (node.bytes) node.parent.children.unshift(node);
    }
  }
}

// Rectangles in rows whose members are as square as they get (Bruls, Huizing, van Wijk: Squarified Treemaps).
function squarify(items, box) {
  const total = items.reduce((sum, item) => sum + item.bytes, 0), found = [];
  if (!total) return found;
  const scale = box.width * box.height / total;
  let { left, top, width, height } = box, at = 0;
  while (at < items.length && width > 0 && height > 0) {
    const side = Math.min(width, height);
    let area = 0, worst = Infinity, end = at;
    while (end < items.length) {
      const more = area + items[end].bytes * scale;
      const ratio = Math.max(side * side * items[at].bytes * scale / more ** 2, more ** 2 / (side * side * items[end].bytes * scale));
      if (ratio > worst) break;
      worst = ratio; area = more; end += 1;
    }
    const thick = area / side;
    let along = 0;
    for (; at < end; at += 1) {
      const length = items[at].bytes * scale / thick;
      found.push(width >= height
        ? { item: items[at], left, top: top + along, width: thick, height: length }
        : { item: items[at], left: left + along, top, width: length, height: thick });
      along += length;
    }
    if (width >= height) { left += thick; width -= thick; } else { top += thick; height -= thick; }
  }
  return found;
}

class PeakPicture {
  constructor(root, tree) {
    this.root = root;
    this.tree = tree;
    this.focus = tree.root;
    this.kind = 'treemap';
    this.picture = $('.picture', root);
    this.path = $('.path', root);
    for (const button of $$('[data-kind]', root)) {
      button.addEventListener('click', () => {
        this.kind = button.dataset.kind;
        $$('[data-kind]', root).forEach((each) => each.setAttribute('aria-pressed', each === button));
        this.draw();
      });
    }
    new ResizeObserver(() => this.draw()).observe(this.picture);
  }

  show(node) { this.focus = node; this.draw(); }

  draw() {
    const width = this.picture.clientWidth, height = this.picture.clientHeight;
    if (width < 20) return;
    this.drawPath();
    const drawing = svg('svg', { viewBox: `0 0 ${width} ${height}`, width, height, 'aria-hidden': 'true' });
    this.drawing = drawing;
    if (this.kind === 'treemap') this.nest(this.focus, { left: 0, top: 0, width, height }, 0);
    else this.drawIcicle(width, height);
    this.picture.replaceChildren(drawing);
  }

  // The path from the whole peak to what is shown, and the layers below it: how the keyboard moves through the picture.
  drawPath() {
    const way = [];
    for (let node = this.focus; node; node = node.parent) way.unshift(node);
    const step = (node, text) => make('button', { type: 'button', onclick: () => this.show(node) }, text);
    const parts = way.map((node, at) => (at + 1 < way.length ? step(node, cut(node.short, 40)) : make('b', {}, `${cut(node.short, 60)}: ${bytesText(node.bytes)}`)));
    const select = make('select', { 'aria-label': 'open a layer below', onchange: () => { if (select.value) this.show(this.tree.nodes[select.value]); } }, make('option', { value: '' }, 'open…'));
    for (const child of this.focus.children) {
      if (child.children.length) select.append(make('option', { value: child.at }, `${cut(child.short, 50)} (${bytesText(child.bytes)})`));
    }
    this.path.replaceChildren(...parts.flatMap((part, at) => (at ? [' › ', part] : [part])), select.length > 1 ? select : '');
  }

  nest(node, box, depth) {
    const items = [...node.parts.map((part) => ({ bytes: part.bytes, part })), ...node.children.map((child) => ({ bytes: child.bytes, child }))];
    items.sort((a, b) => b.bytes - a.bytes);
    for (const { item, left, top, width, height } of squarify(items, box)) {
      if (width < 0.5 || height < 0.5 || width * height < 4) continue; // too small to see, and there may be 100,000
      if (item.part) { this.leaf(item.part, { left, top, width, height }); continue; }
      const inside = width > 46 && height > 34 ? { left: left + 2, top: top + 15, width: width - 4, height: height - 17 } : { left: left + 0.5, top: top + 0.5, width: width - 1, height: height - 1 };
      const titled = inside.top - top > 10;
      this.frame(item.child, { left, top, width, height }, titled);
      if (inside.width > 2 && inside.height > 2 && depth < 12) this.nest(item.child, inside, depth + 1);
    }
  }

  frame(node, box, titled) {
    const rect = this.rect(box, 'frame');
    this.answer(rect, node, `${node.name}: ${bytesText(node.bytes)}`);
    if (titled) this.label(node.short, box.left + 4, box.top + 11.5, box.width - 8, 'title');
  }

  leaf(part, box) {
    const rect = this.rect(box, `leaf k-${part.category}`);
    this.answer(rect, part.of, `${part.of.name}: ${bytesText(part.bytes)} ${spoken(part.category)}`);
    if (box.width > 54 && box.height > 30) {
      this.label(spoken(part.category), box.left + 5, box.top + 15, box.width - 10, 'on');
      this.label(bytesText(part.bytes), box.left + 5, box.top + 29, box.width - 10, 'on');
    }
  }

  rect({ left, top, width, height }, kind) {
    const rect = svg('rect', { x: left.toFixed(2), y: top.toFixed(2), width: width.toFixed(2), height: height.toFixed(2), class: kind });
    this.drawing.append(rect);
    return rect;
  }

  label(text, x, y, width, kind) {
    const most = Math.floor(width / 6.4);
    if (most >= 3) this.drawing.append(Object.assign(svg('text', { x, y, class: kind }), { textContent: cut(text, most) }));
  }

  answer(rect, node, text) {
    rect.addEventListener('pointermove', (event) => {
      const share = node.bytes / this.tree.root.bytes;
      note.show(event.clientX, event.clientY, make('p', { class: 'head' }, cut(text, 200)), make('p', {}, `with everything below: ${bytesText(node.bytes)}, ${(share * 100).toFixed(1)}% of the peak`));
    });
    rect.addEventListener('pointerleave', () => note.hide());
    rect.addEventListener('click', () => { note.hide(); this.show(node === this.focus ? node.parent || node : node); });
  }

  drawIcicle(width, height) {
    const deepest = (node) => 1 + Math.max(0, ...node.children.map(deepest));
    const rows = Math.min(deepest(this.focus) + 1, 14), thick = height / rows;
    const visit = (node, left, span, row) => {
      if (span < 0.4 || row >= rows) return;
      const box = { left, top: row * thick, width: span, height: thick - 1 };
      this.answer(this.rect(box, 'frame'), node, `${node.name}: ${bytesText(node.bytes)}`);
      if (span > 40) {
        this.label(node.short, left + 4, row * thick + Math.min(16, thick / 2 + 4), span - 8, 'title');
        if (thick > 34) this.label(bytesText(node.bytes), left + 4, row * thick + 31, span - 8, 'title');
      }
      let at = left;
      for (const child of node.children) {
        visit(child, at, span * child.bytes / node.bytes, row + 1);
        at += span * child.bytes / node.bytes;
      }
      for (const part of row + 1 < rows ? node.parts : []) {
        const share = span * part.bytes / node.bytes;
        if (share > 0.4) this.leaf(part, { left: at, top: (row + 1) * thick, width: share, height: thick - 1 });
        at += share;
      }
    };
    if (this.focus.bytes) visit(this.focus, 0, width, 0);
  }
}
