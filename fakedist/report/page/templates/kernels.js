// The step by stream on a canvas: phases, layers below each other, and a lane for every stream.

const LANE = 22, ROW = 17, HEAD = 22, MOST_DEPTH = 6, MARGIN = 92;

class KernelPlot {
  constructor(root, data) {
    this.data = data;
    this.canvas = $('canvas.lanes', root);
    this.status = $('.status', root);
    this.moved = null; // called with every new view, in microseconds
    this.whole = [0, data.meta.step_us / data.meta.tick_us];
    this.view = [...this.whole];
    this.wholeOfKernels();
    this.depth = Math.min(MOST_DEPTH, 1 + data.run_depth.reduce((most, depth) => Math.max(most, depth), -1));
    this.lanes = data.meta.streams.map(() => []);
    for (let bar = 0; bar < data.bar_kind.length; bar += 1) this.lanes[data.bar_stream[bar]].push(bar);
    this.top = HEAD + this.depth * ROW + 6;
    this.canvas.style.height = `${this.top + this.lanes.length * LANE + 22}px`;
    if (data.meta.merged) $('.merged', root).textContent = ` Of ${countText(data.meta.num_kernels)} kernels, neighbouring ones are merged into one bar.`;
    this.wire(root);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    this.announce();
  }

  // Kernels that end after the step's recorded end are shown too.
  wholeOfKernels() {
    const { bar_start: start, bar_length: length } = this.data;
    for (let bar = 0; bar < start.length; bar += 1) this.whole[1] = Math.max(this.whole[1], start[bar] + length[bar]);
    this.view = [...this.whole];
  }

  get left() { return this.canvas.clientWidth < 560 ? 8 : MARGIN; }
  get width() { return this.canvas.clientWidth - this.left - 8; }
  x(tick) { return this.left + (tick - this.view[0]) / (this.view[1] - this.view[0]) * this.width; }
  tickAt(x) { return this.view[0] + (x - this.left) / this.width * (this.view[1] - this.view[0]); }
  us(ticks) { return ticks * this.data.meta.tick_us; }

  setView(from, to) {
    const most = this.whole[1], width = Math.min(Math.max(to - from, Math.min(16, most)), most);
    const start = Math.min(Math.max(from, 0), most - width);
    this.view = [start, start + width];
    this.draw();
    this.announce();
    if (this.moved) this.moved(this.view.map((tick) => this.us(tick)));
  }

  // The view of another step on the same axis.
  follow(view) {
    this.view = view.map((us) => us / this.data.meta.tick_us);
    this.draw();
    this.announce();
  }

  zoom(factor, around = (this.view[0] + this.view[1]) / 2) {
    this.setView(around - (around - this.view[0]) * factor, around + (this.view[1] - around) * factor);
  }

  pan(share) {
    const width = this.view[1] - this.view[0];
    this.setView(this.view[0] + share * width, this.view[1] + share * width);
  }

  announce() {
    this.status.textContent = `${usText(this.us(this.view[0]))} to ${usText(this.us(this.view[1]))} of ${usText(this.us(this.whole[1]))}`;
  }

  draw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => { this.pending = 0; this.paint(); });
  }

  paint() {
    const { canvas } = this, context = canvas.getContext('2d');
    canvas.width = Math.round(canvas.clientWidth * devicePixelRatio);
    canvas.height = Math.round(canvas.clientHeight * devicePixelRatio);
    if (this.width < 20) return;
    context.scale(devicePixelRatio, devicePixelRatio);
    context.font = `12px ${colourOf('font')}`;
    context.textBaseline = 'middle';
    this.paintTexts(context);
    context.save();
    context.beginPath();
    context.rect(this.left, 0, this.width, canvas.clientHeight);
    context.clip();
    this.paintGrid(context);
    this.paintParts(context);
    this.paintRuns(context);
    this.lanes.forEach((bars, lane) => this.paintLane(context, bars, this.top + lane * LANE));
    this.paintSelection(context);
    context.restore();
  }

  paintTexts(context) {
    if (this.left < MARGIN) return;
    context.fillStyle = colourOf('muted');
    context.textAlign = 'right';
    context.fillText('phase', MARGIN - 8, HEAD / 2 - 1);
    if (this.depth) context.fillText('layers', MARGIN - 8, HEAD + ROW / 2);
    this.data.meta.streams.forEach((name, lane) => {
      context.fillText(name, MARGIN - 8, this.top + lane * LANE + LANE / 2 - 1);
    });
  }

  paintGrid(context) {
    const count = Math.max(2, Math.floor(this.width / 130)), floor = this.top + this.lanes.length * LANE;
    const span = this.us(this.view[1] - this.view[0]);
    let step = 10 ** Math.floor(Math.log10(span / count));
    for (const factor of [1, 2, 5, 10]) if (span / (step * factor) <= count) { step *= factor; break; }
    context.textAlign = 'center';
    for (let at = Math.ceil(this.us(this.view[0]) / step) * step; at <= this.us(this.view[1]); at += step) {
      const x = Math.round(this.x(at / this.data.meta.tick_us)) + 0.5;
      context.fillStyle = colourOf('line');
      context.fillRect(x, HEAD, 1, floor - HEAD);
      context.fillStyle = colourOf('muted');
      const text = this.tickText(at, step), half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(Math.max(x, this.left + half), this.left + this.width - half), floor + 12);
    }
  }

  // As many decimals as the distance between two ticks needs.
  tickText(us, step) {
    const [unit, factor] = step >= 1e5 ? ['s', 1e6] : step >= 100 ? ['ms', 1e3] : ['us', 1];
    return `${(us / factor).toFixed(Math.max(0, -Math.floor(Math.log10(step / factor) + 1e-9)))} ${unit}`;
  }

  *visible(start, length, rows) {
    const [from, to] = this.view, count = rows ? rows.length : start.length;
    for (let i = 0; i < count; i += 1) {
      const row = rows ? rows[i] : i;
      if (start[row] >= to) { if (rows) return; continue; }
      if (start[row] + length[row] >= from) yield row;
    }
  }

  paintParts(context) {
    const { part_start: start, part_length: length, part_kind: kind, meta } = this.data;
    for (const part of this.visible(start, length)) {
      this.box(context, [start[part], length[part]], [1, HEAD - 4], colourOf(`p-${meta.kinds[kind[part]]}`), meta.kinds[kind[part]]);
    }
  }

  paintRuns(context) {
    const { run_start: start, run_length: length, run_depth: depth, run_layer: layer, run_kind: kind, meta } = this.data;
    const pixel = (this.view[1] - this.view[0]) / this.width, last = new Float64Array(MOST_DEPTH).fill(-1);
    for (const run of this.visible(start, length)) {
      if (depth[run] >= this.depth) continue;
      const end = start[run] + length[run];
      if (length[run] < pixel * 0.6 && end < last[depth[run]] + pixel) continue; // too narrow to see
      last[depth[run]] = end;
      this.box(context, [start[run], length[run]], [HEAD + depth[run] * ROW, ROW - 2], colourOf(`p-${meta.kinds[kind[run]]}`), shortName(meta.layers[layer[run]]));
    }
  }

  paintLane(context, bars, y) {
    const { bar_start: start, bar_length: length, bar_kind: of, bars_family: family, bars_known: known, bars_name: name, meta } = this.data;
    const colours = meta.families.map((each) => colourOf(`f-${each}`));
    context.fillStyle = colourOf('soft');
    context.fillRect(this.left, y, this.width, LANE - 3);
    for (const bar of this.visible(start, length, bars)) {
      const colour = colours[family[of[bar]]];
      if (!known[of[bar]]) { context.fillStyle = colour; context.fillRect(this.x(start[bar]) - 0.5, y - 1, 1, LANE - 1); continue; }
      this.box(context, [start[bar], length[bar]], [y, LANE - 3], colour, meta.kernels[name[of[bar]]], 'on');
    }
  }

  box(context, [start, length], [y, height], colour, text, ink = 'ink') {
    const left = this.x(start), right = this.x(start + length), from = Math.max(left, this.left);
    const width = Math.min(right, this.left + this.width) - from;
    context.fillStyle = colour;
    context.fillRect(from, y, Math.max(right - left > 3 ? width - 0.6 : width, 0.4), height);
    if (width < 34) return;
    context.fillStyle = colourOf(ink);
    context.textAlign = 'left';
    context.fillText(cut(text, Math.floor((width - 8) / 6.6)), from + 4, y + height / 2 + 0.5);
  }

  paintSelection(context) {
    if (this.selecting === undefined || this.at === undefined) return;
    context.fillStyle = colourOf('glow');
    const x = this.x(this.selecting);
    context.fillRect(Math.min(x, this.at), 0, Math.abs(x - this.at), this.top + this.lanes.length * LANE);
  }

  // ---- pointing and moving

  wire(root) {
    const { canvas } = this;
    canvas.addEventListener('pointerdown', (event) => {
      canvas.focus({ preventScroll: true });
      if (event.pointerType !== 'mouse' || event.button) return;
      canvas.setPointerCapture(event.pointerId);
      this.selecting = this.tickAt(event.offsetX);
      this.pressedAt = event.offsetX;
    });
    canvas.addEventListener('pointerup', (event) => {
      const from = this.selecting;
      this.selecting = undefined;
      if (from === undefined || Math.abs(event.offsetX - this.pressedAt) < 5) { this.draw(); return; }
      const to = this.tickAt(event.offsetX);
      this.setView(Math.min(from, to), Math.max(from, to));
    });
    canvas.addEventListener('pointermove', (event) => { this.at = event.offsetX; if (this.selecting !== undefined) this.draw(); this.point(event); });
    canvas.addEventListener('pointercancel', () => { this.selecting = undefined; });
    canvas.addEventListener('pointerleave', () => note.hide());
    canvas.addEventListener('blur', () => note.hide());
    canvas.addEventListener('dblclick', () => this.setView(...this.whole));
    canvas.addEventListener('wheel', (event) => this.wheel(event), { passive: false });
    canvas.addEventListener('keydown', (event) => this.key(event));
    this.wireButtons(root);
  }

  wireButtons(root) {
    const acts = { whole: () => this.setView(...this.whole), left: () => this.pan(-0.25), right: () => this.pan(0.25), in: () => this.zoom(0.5), out: () => this.zoom(2) };
    for (const button of $$('[data-do]', root)) button.addEventListener('click', acts[button.dataset.do]);
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
    event.preventDefault();
    if (event.shiftKey) this.pan(Math.sign(event.deltaY || event.deltaX) * 0.1);
    else this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.tickAt(event.offsetX));
  }

  key(event) {
    const acts = { ArrowLeft: () => this.pan(-0.1), ArrowRight: () => this.pan(0.1), '+': () => this.zoom(0.5), '=': () => this.zoom(0.5), '-': () => this.zoom(2), 0: () => this.setView(...this.whole) };
    if (!acts[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    acts[event.key]();
  }

  point(event) {
    const tick = this.tickAt(event.offsetX), y = event.offsetY, { data } = this;
    if (y < this.top) { this.pointLayer(event, tick, Math.floor((y - HEAD) / ROW)); return; }
    const lane = this.lanes[Math.floor((y - this.top) / LANE)];
    const bar = lane === undefined ? -1 : this.nearest(lane, tick);
    if (bar < 0) { note.hide(); return; }
    const of = data.bar_kind[bar], num = data.bar_num[bar], name = data.meta.kernels[data.bars_name[of]];
    const long = data.bars_known[of] ? usText(this.us(data.bar_length[bar])) : 'duration not known';
    note.show(event.clientX, event.clientY,
      make('p', { class: 'head' }, make('b', {}, num > 1 ? `${countText(num)} kernels` : name), `, ${long}`),
      ...(num > 1 ? [make('p', {}, `the longest: ${name}`)] : []),
      make('p', {}, `${data.meta.families[data.bars_family[of]]}, ${data.meta.kinds[data.bars_kind[of]]}, at ${usText(this.us(data.bar_start[bar]))}`),
      make('p', {}, data.meta.layers[data.bars_layer[of]] || '(outside of modules)'));
  }

  // The bar at a moment, or the next one within three pixels.
  nearest(lane, tick) {
    const { bar_start: start, bar_length: length } = this.data, near = 3 * (this.view[1] - this.view[0]) / this.width;
    let best = -1, away = near;
    for (const bar of this.visible(start, length, lane)) {
      const distance = Math.max(start[bar] - tick, tick - start[bar] - length[bar], 0);
      if (distance < away) { best = bar; away = distance; if (!distance) break; }
    }
    return best;
  }

  pointLayer(event, tick, depth) {
    const { run_start: start, run_length: length, run_depth: depths, run_layer: layer, run_kind: kind, meta } = this.data;
    for (const run of this.visible(start, length)) {
      if (depths[run] !== depth || start[run] > tick || start[run] + length[run] < tick) continue;
      note.show(event.clientX, event.clientY, make('p', { class: 'head' }, make('b', {}, meta.layers[layer[run]]), `, ${usText(this.us(length[run]))}`), make('p', {}, meta.kinds[kind[run]]));
      return;
    }
    note.hide();
  }
}
