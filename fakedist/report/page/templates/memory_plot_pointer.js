// Mouse, touch and keyboard of the timeline, and its text about the moment under the pointer.

Object.assign(Plot.prototype, {
  wire() {
    const { canvas } = this;
    canvas.addEventListener('pointermove', (event) => this.point(event));
    canvas.addEventListener('pointerleave', () => { this.pointed = false; this.block = -1; note.hide(); this.draw(); });
    canvas.addEventListener('pointerdown', (event) => this.press(event));
    canvas.addEventListener('pointerup', (event) => this.release(event));
    canvas.addEventListener('pointercancel', () => { this.fingers.clear(); this.selecting = null; });
    canvas.addEventListener('dblclick', () => this.setView(...this.whole));
    canvas.addEventListener('wheel', (event) => this.wheel(event), { passive: false });
    canvas.addEventListener('keydown', (event) => this.key(event));
    canvas.addEventListener('blur', () => note.hide());
    this.fingers = new Map();
    this.wireOverview();
    for (const button of $$('[data-do]', this.root)) button.addEventListener('click', () => this.act(button.dataset.do));
    const box = $('input.reserved', this.root);
    if (box) box.addEventListener('change', () => { this.showReserved = box.checked; this.draw(); });
  },

  act(what) {
    const [from, to] = this.view, peak = this.timeline.peak.move;
    if (what === 'in') this.zoom(0.5);
    else if (what === 'out') this.zoom(2);
    else if (what === 'left') this.pan(-0.25);
    else if (what === 'right') this.pan(0.25);
    else if (what === 'whole') this.setView(...this.whole);
    else if (what === 'peak') {
      const width = Math.min(to - from, Math.max(200, this.whole[1] / 200));
      this.setView(peak - width / 2, peak + width / 2);
      this.pin(peak);
    } else if (what.startsWith('step ')) this.showStep(Number(what.slice(5)));
  },

  wireOverview() {
    const { overview } = this;
    const jump = (event) => {
      const width = this.view[1] - this.view[0];
      const at = (event.offsetX - LEFT) / this.width * this.whole[1];
      this.setView(at - width / 2, at + width / 2);
    };
    overview.addEventListener('pointerdown', (event) => { overview.setPointerCapture(event.pointerId); jump(event); });
    overview.addEventListener('pointermove', (event) => { if (event.buttons) jump(event); });
  },

  press(event) {
    this.canvas.focus({ preventScroll: true });
    this.fingers.set(event.pointerId, event.offsetX);
    this.moved = false;
    if (event.pointerType === 'mouse' && event.button === 0) {
      this.canvas.setPointerCapture(event.pointerId);
      this.selecting = this.moveAt(event.offsetX);
      this.pressedAt = event.offsetX;
    }
  },

  release(event) {
    const dragged = this.selecting !== null && this.selecting !== undefined && Math.abs(event.offsetX - this.pressedAt) > 4;
    const before = this.selecting;
    this.fingers.delete(event.pointerId);
    this.selecting = null;
    if (dragged) {
      const to = this.moveAt(event.offsetX);
      this.setView(Math.min(before, to), Math.max(before, to));
      return;
    }
    if (event.pointerType === 'touch' && this.moved) return;
    if (event.pointerType === 'touch') this.look(event.offsetX, event.offsetY);
    this.pin(this.cursor, this.block);
  },

  point(event) {
    const last = this.fingers.get(event.pointerId);
    if (event.pointerType === 'touch' && last !== undefined) { this.drag(event, last); return; }
    this.look(event.offsetX, event.offsetY);
    note.show(event.clientX, event.clientY, ...this.describe(this.cursor, this.block, true));
  },

  // One finger moves the view, two zoom it.
  drag(event, last) {
    this.moved ||= Math.abs(event.offsetX - last) > 3;
    if (!this.moved) return;
    const others = [...this.fingers].filter(([id]) => id !== event.pointerId);
    const perPixel = (this.view[1] - this.view[0]) / this.width;
    if (others.length) {
      const other = others[0][1], before = Math.abs(last - other), after = Math.abs(event.offsetX - other);
      if (before > 8 && after > 8) this.zoom(before / after, this.moveAt(other));
    } else this.setView(this.view[0] - (event.offsetX - last) * perPixel, this.view[1] - (event.offsetX - last) * perPixel);
    this.fingers.set(event.pointerId, event.offsetX);
  },

  wheel(event) {
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.pan((event.deltaX || event.deltaY) / 1000);
    } else if (event.ctrlKey || event.metaKey || document.activeElement === this.canvas) {
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY / 400), this.moveAt(event.offsetX));
    }
  },

  key(event) {
    const stride = Math.max(1, Math.round((this.view[1] - this.view[0]) / this.width * 4));
    const actions = {
      ArrowLeft: () => (event.shiftKey ? this.pan(-0.25) : this.step(-stride)),
      ArrowRight: () => (event.shiftKey ? this.pan(0.25) : this.step(stride)),
      ',': () => this.step(-1), '.': () => this.step(1),
      '+': () => this.zoom(0.5, this.inView()), '=': () => this.zoom(0.5, this.inView()), '-': () => this.zoom(2, this.inView()),
      0: () => this.setView(...this.whole), p: () => this.act('peak'),
      Enter: () => this.pin(this.cursor, this.block), Escape: () => { note.hide(); this.setView(...this.whole); },
    };
    if (event.ctrlKey || event.metaKey || !actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  },

  inView() { return Math.min(Math.max(this.cursor, this.view[0]), this.view[1]); },

  step(by) {
    const last = this.timeline.numMoves - 1;
    this.cursor = Math.min(Math.max(this.cursor + by, 0), last);
    if (this.cursor < this.view[0] || this.cursor >= this.view[1]) {
      const width = this.view[1] - this.view[0];
      this.setView(this.cursor - width / 2, this.cursor + width / 2, { announce: false });
    }
    this.pointed = true;
    this.block = Math.abs(this.timeline.blockOf[this.cursor]) - 1;
    this.below = -1;
    this.draw();
    this.pin(this.cursor, this.block);
  },

  // The moment and the block under a point.
  look(x, y) {
    if (!this.seen || !this.seen.count) return;
    const { edges, where, states, count } = this.seen, num = this.timeline.categories.length;
    const move = this.moveAt(x);
    let low = 0, high = count;
    while (high - low > 1) { const middle = (low + high) >> 1; if (edges[middle] <= move) low = middle; else high = middle; }
    this.cursor = where[low];
    this.pointed = true;
    this.block = this.below = -1;
    let floor = 0, height = (1 - (y - TOP) / this.height) * this.top;
    for (let c = 0; c < num && height >= 0; c += 1) {
      if (height < states[low * num + c]) {
        const found = this.timeline.blockAt(this.cursor, c, height);
        this.block = found.block;
        this.below = found.block < 0 ? -1 : floor + found.below;
        break;
      }
      height -= states[low * num + c];
      floor += states[low * num + c];
    }
    this.draw();
  },

  describe(move, block, brief) {
    if (move < 0) return [];
    const { timeline } = this, state = timeline.state(move), span = timeline.span(move);
    const total = state.reduce((sum, bytes) => sum + bytes, 0);
    const where = span ? `step ${span.step}, ${span.phase}, ` : '';
    const parts = [make('p', { class: 'head' }, make('b', {}, bytesText(total)), ` allocated · ${where}move ${countText(move)}`)];
    if (block >= 0) parts.push(this.describeBlock(timeline.block(block), brief));
    const list = make('ul', { class: 'chips' });
    timeline.categories.forEach((name, c) => {
      if (state[c]) list.append(make('li', {}, make('i', { class: `chip k-${timeline.colours[c]}` }), `${cut(name, 60)} ${bytesText(state[c])}`));
    });
    parts.push(list);
    return parts;
  },

  describeBlock(block, brief) {
    const shown = (text) => (brief ? cut(text, 120) : text);
    const rows = [
      ['block', `${bytesText(block.bytes)} ${block.category === block.line ? '' : cut(block.category, 60)}`.trim()],
      ['layer', shown(block.layer)],
      ['operation', shown(block.operation)],
      ['line', shown(block.line)],
      ['alive', `from move ${countText(block.made)} ${block.freed < this.timeline.numMoves ? `to ${countText(block.freed)}` : 'to the end'}`],
    ];
    const list = make('dl', {});
    for (const [name, value] of rows) if (value) list.append(make('dt', {}, name), make('dd', {}, value));
    return list;
  },

  pin(move, block = -1) { this.pinned.replaceChildren(...this.describe(move, block, false)); },

  // Show one block: its whole lifetime and a margin.
  showBlock(number) {
    const { made, freed } = this.timeline.block(number), margin = Math.max(20, (freed - made) * 0.15);
    this.setView(made - margin, freed + margin);
    this.block = number;
    this.below = -1;
    this.cursor = made;
    this.pointed = true;
    this.pin(made, number);
    this.draw();
  },
});
