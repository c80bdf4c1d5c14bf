// The memory timeline on a canvas. It is exact at every zoom, because every column asks for its own largest moment.

const LEFT = 74, TOP = 26, BOTTOM = 22, RIGHT = 10, OVERVIEW = 46;

class Plot {
  constructor(root, timeline, facts) {
    this.root = root;
    this.timeline = timeline;
    this.facts = facts;
    this.canvas = $('canvas.main', root);
    this.overview = $('canvas.overview', root);
    this.status = $('.status', root);
    this.pinned = $('.pinned', root);
    this.listeners = [];
    this.whole = [0, Math.max(timeline.numMoves, 1)];
    this.view = [...this.whole];
    this.cursor = timeline.peak.move;
    this.block = -1;
    this.below = -1; // bytes below the block at the cursor, where the pointer was
    this.showReserved = timeline.reserved(0, this.whole[1]) <= 2.5 * timeline.peak.bytes; // otherwise it dwarfs the rest
    $('input.reserved', root).checked = this.showReserved;
    this.wire();
    new ResizeObserver(() => this.resize()).observe(this.canvas);
  }

  // ---- where things are

  get width() { return this.canvas.clientWidth - LEFT - RIGHT; }
  get height() { return this.canvas.clientHeight - TOP - BOTTOM; }
  x(move) { return LEFT + (move - this.view[0]) / (this.view[1] - this.view[0]) * this.width; }
  moveAt(x) {
    const move = this.view[0] + (x - LEFT) / this.width * (this.view[1] - this.view[0]);
    return Math.min(Math.max(move, this.view[0]), this.view[1]);
  }
  y(bytes) { return TOP + this.height * (1 - bytes / this.top); }

  resize() {
    for (const canvas of [this.canvas, this.overview]) {
      canvas.width = Math.round(canvas.clientWidth * devicePixelRatio);
      canvas.height = Math.round(canvas.clientHeight * devicePixelRatio);
    }
    this.drawOverview();
    this.draw();
  }

  // ---- zooming

  setView(from, to, { announce = true } = {}) {
    const [first, last] = this.whole, most = last - first;
    const width = Math.min(Math.max(to - from, Math.min(8, most)), most);
    const start = Math.min(Math.max(from, first), last - width);
    this.view = [start, start + width];
    this.draw();
    for (const listener of this.listeners) listener(this.view);
    if (announce) this.announce();
  }

  zoom(factor, around = (this.view[0] + this.view[1]) / 2) {
    const [from, to] = this.view;
    this.setView(around - (around - from) * factor, around + (to - around) * factor);
  }

  pan(share) {
    const width = this.view[1] - this.view[0];
    this.setView(this.view[0] + share * width, this.view[1] + share * width);
  }

  showStep(step) {
    const { span_step: steps, span_move: first } = this.timeline.data;
    let from = -1, to = this.whole[1];
    for (let i = 0; i < steps.length; i += 1) {
      if (steps[i] === step && from < 0) from = first[i];
      if (steps[i] > step && from >= 0) { to = first[i]; break; }
    }
    if (from >= 0) this.setView(from, to);
  }

  announce() {
    const [from, to] = this.view.map(Math.round);
    this.status.textContent = `moves ${countText(from)} to ${countText(to)} of ${countText(this.timeline.numMoves)}`;
  }

  // ---- drawing

  // Columns of the view: one per move if moves are wide, otherwise one per device pixel at its largest moment.
  columns(view, width) {
    const { timeline } = this, num = timeline.categories.length;
    const [from, to] = view, perPixel = (to - from) / Math.max(1, Math.round(width * devicePixelRatio));
    const wide = perPixel <= 1;
    const first = Math.floor(from), count = wide ? Math.ceil(to) - first : Math.round(width * devicePixelRatio);
    const edges = new Float64Array(count + 1), where = new Int32Array(count);
    const least = new Float64Array(count), states = new Float64Array(count * num), one = new Float64Array(num);
    for (let i = 0; i < count; i += 1) {
      const start = wide ? first + i : Math.floor(from + i * perPixel);
      const end = wide ? start + 1 : Math.max(start + 1, Math.floor(from + (i + 1) * perPixel));
      edges[i] = wide ? start : from + i * perPixel;
      const found = timeline.range(start, Math.min(end, timeline.numMoves));
      where[i] = found.where;
      least[i] = found.least;
      states.set(timeline.state(found.where, one), i * num);
    }
    edges[count] = to;
    return { count, edges, where, least, states, wide };
  }

  draw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => { this.pending = 0; this.paint(); });
  }

  paint() {
    const context = this.canvas.getContext('2d');
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, this.canvas.clientWidth, this.canvas.clientHeight);
    if (!this.timeline.numMoves || this.width < 20) return;
    const columns = this.columns(this.view, this.width);
    this.seen = columns;
    this.top = this.ceiling(columns);
    this.paintSpans(context);
    this.paintGrid(context);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP - 2, this.width, this.height + 2);
    context.clip();
    if (columns.wide) this.paintStack(context, columns);
    else context.drawImage(this.raster(columns, this.height, this.top), LEFT, TOP, this.width, this.height);
    if (this.showReserved) this.paintReserved(context, columns);
    this.paintLine(context, this.facts.capacity, 'bad', 'GPU memory');
    this.paintBlock(context);
    context.restore();
    this.paintPeak(context);
    this.paintCursor(context);
    this.paintBrush();
  }

  ceiling(columns) {
    const num = this.timeline.categories.length;
    let most = 1;
    for (let i = 0; i < columns.count; i += 1) {
      let total = 0;
      for (let c = 0; c < num; c += 1) total += columns.states[i * num + c];
      if (total > most) most = total;
    }
    if (this.showReserved) most = Math.max(most, this.timeline.reserved(Math.floor(this.view[0]), Math.ceil(this.view[1])));
    return most * 1.06;
  }

  // Columns of one device pixel, pixel by pixel: ten times as fast as paths. The veil spans a column's least and largest
  // moment, between which memory went up and down.
  raster({ count, least, states }, height, top) {
    const { categories, colours } = this.timeline, num = categories.length, rows = Math.round(height * devicePixelRatio);
    const canvas = new OffscreenCanvas(count, rows), context = canvas.getContext('2d');
    const image = context.createImageData(count, rows), pixels = new Uint32Array(image.data.buffer);
    const plain = colours.map((name) => pixelOf(categoryColour(name)));
    const veiled = colours.map((name) => pixelOf(categoryColour(name), colourOf('veil')));
    for (let i = 0; i < count; i += 1) {
      const veil = Math.round(rows * (1 - least[i] / top));
      let floor = 0, row = rows;
      for (let c = 0; c < num; c += 1) {
        floor += states[i * num + c];
        const end = Math.max(0, Math.round(rows * (1 - floor / top)));
        for (; row > end; row -= 1) pixels[(row - 1) * count + i] = row <= veil ? veiled[c] : plain[c];
      }
    }
    context.putImageData(image, 0, 0);
    return canvas;
  }

  // Columns of whole moves, as a staircase.
  paintStack(context, columns) {
    const y = (bytes) => this.y(bytes), x = (move) => this.x(move);
    const { categories, colours } = this.timeline, { count, edges, states } = columns, num = categories.length;
    const floor = new Float64Array(count);
    for (let c = 0; c < num; c += 1) {
      let any = false;
      context.beginPath();
      for (let i = 0; i < count; i += 1) {
        const top = y(floor[i] + states[i * num + c]);
        any ||= states[i * num + c] > 0;
        context.lineTo(x(edges[i]), top);
        context.lineTo(x(edges[i + 1]), top);
      }
      for (let i = count - 1; i >= 0; i -= 1) {
        const bottom = y(floor[i]);
        context.lineTo(x(edges[i + 1]), bottom);
        context.lineTo(x(edges[i]), bottom);
        floor[i] += states[i * num + c];
      }
      if (!any) continue;
      context.fillStyle = categoryColour(colours[c]);
      context.fill();
    }
  }

  paintReserved(context, { count, edges }) {
    context.beginPath();
    for (let i = 0; i < count; i += 1) {
      const at = this.y(this.timeline.reserved(Math.floor(edges[i]), Math.max(Math.ceil(edges[i + 1]), Math.floor(edges[i]) + 1)));
      context.lineTo(this.x(edges[i]), at);
      context.lineTo(this.x(edges[i + 1]), at);
    }
    context.strokeStyle = colourOf('ink');
    context.lineWidth = 1.25;
    context.setLineDash([5, 3]);
    context.stroke();
    context.setLineDash([]);
  }

  paintLine(context, bytes, colour, text) {
    if (!bytes || bytes > this.top) return;
    context.strokeStyle = context.fillStyle = colourOf(colour);
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(LEFT, this.y(bytes));
    context.lineTo(LEFT + this.width, this.y(bytes));
    context.stroke();
    context.font = `12px ${colourOf('font')}`;
    context.textAlign = 'right';
    context.fillText(`${text} ${bytesText(bytes)}`, LEFT + this.width - 4, this.y(bytes) + 14);
  }

  paintSpans(context) {
    const { span_move: first, span_step: step, span_phase: phase, meta } = this.timeline.data;
    if (!first) return;
    context.font = `12px ${colourOf('font')}`;
    context.textBaseline = 'middle';
    for (let i = 0; i < first.length; i += 1) {
      const end = i + 1 < first.length ? first[i + 1] : this.whole[1];
      if (end <= this.view[0] || first[i] >= this.view[1] || end === first[i]) continue;
      const left = Math.max(this.x(first[i]), LEFT), right = Math.min(this.x(end), LEFT + this.width);
      const name = meta.phases[phase[i]];
      context.fillStyle = colourOf(`p-${name}`);
      context.fillRect(left, 0, right - left, TOP - 4);
      context.globalAlpha = 0.35;
      context.fillRect(left, TOP - 4, right - left, this.height + 4);
      context.globalAlpha = 1;
      const words = [`step ${step[i]} ${name}`, name, name.slice(0, 3)];
      const word = words.find((each) => context.measureText(each).width < right - left - 8);
      if (!word) continue;
      context.fillStyle = colourOf('ink');
      context.textAlign = 'left';
      context.fillText(word, left + 5, (TOP - 4) / 2 + 1);
    }
  }

  paintGrid(context) {
    context.font = `12px ${colourOf('font')}`;
    context.lineWidth = 1;
    context.textAlign = 'right';
    context.textBaseline = 'middle';
    for (const bytes of byteTicks(this.top, Math.max(2, this.height / 48))) {
      const at = Math.round(this.y(bytes)) + 0.5;
      context.strokeStyle = colourOf('line');
      context.beginPath();
      context.moveTo(LEFT, at);
      context.lineTo(LEFT + this.width, at);
      context.stroke();
      context.fillStyle = colourOf('muted');
      context.fillText(tickText(bytes), LEFT - 6, at);
    }
    const count = Math.max(2, Math.floor(this.width / 130)), [from, to] = this.view;
    context.textBaseline = 'alphabetic';
    for (let i = 0; i <= count; i += 1) {
      const move = from + (to - from) * i / count;
      context.textAlign = i === 0 ? 'left' : i === count ? 'right' : 'center';
      context.fillText(countText(Math.round(move)), this.x(move), TOP + this.height + 16);
    }
  }

  paintPeak(context) {
    const { move, bytes } = this.timeline.peak;
    const x = this.x(move + 0.5), y = this.y(bytes);
    if (move < this.view[0] || move >= this.view[1]) return;
    context.fillStyle = context.strokeStyle = colourOf('ink');
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x, TOP - 3);
    context.lineTo(x, y);
    context.setLineDash([2, 3]);
    context.stroke();
    context.setLineDash([]);
    context.beginPath();
    context.arc(x, y, 4, 0, 7);
    context.fill();
    const text = `peak ${bytesText(bytes)}`;
    context.font = `600 13px ${colourOf('font')}`;
    const width = context.measureText(text).width + 12;
    const left = x + 8 + width > LEFT + this.width ? x - 8 - width : x + 8;
    context.fillStyle = colourOf('panel');
    context.globalAlpha = 0.9;
    context.fillRect(left, y - 10, width, 20);
    context.globalAlpha = 1;
    context.fillStyle = colourOf('ink');
    context.textAlign = 'left';
    context.textBaseline = 'middle';
    context.fillText(text, left + 6, y + 1);
  }

  // The lifetime of the block under the pointer as a bar on top, and the block itself at the cursor.
  paintBlock(context) {
    if (this.block < 0 || !this.pointed) return;
    const { made, freed, bytes } = this.timeline.block(this.block);
    const left = Math.max(this.x(made), LEFT), right = Math.min(this.x(freed), LEFT + this.width);
    context.fillStyle = colourOf('ink');
    context.fillRect(left, TOP - 2, Math.max(right - left, 1.5), 4);
    for (const x of [this.x(made), this.x(freed)]) {
      if (x > LEFT && x < LEFT + this.width) context.fillRect(x - 0.5, TOP, 1, this.height);
    }
    if (this.below < 0) return;
    const top = this.y(this.below + bytes), height = Math.max(this.y(this.below) - top, 2);
    context.fillRect(this.x(this.cursor + 0.5) - 4, top, 8, height);
    context.fillStyle = colourOf('panel');
    if (height > 4) context.fillRect(this.x(this.cursor + 0.5) - 2.5, top + 1.5, 5, height - 3);
  }

  paintCursor(context) {
    if (this.cursor < this.view[0] || this.cursor >= this.view[1] || !this.pointed) return;
    const x = Math.round(this.x(this.cursor + 0.5)) + 0.5;
    context.strokeStyle = colourOf('accent');
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x, TOP);
    context.lineTo(x, TOP + this.height);
    context.stroke();
    if (this.selecting) {
      const other = this.x(this.selecting);
      context.fillStyle = colourOf('glow');
      context.fillRect(Math.min(x, other), TOP, Math.abs(x - other), this.height);
    }
  }

  drawOverview() {
    if (!this.timeline.numMoves || this.width < 20) return;
    const columns = this.columns(this.whole, this.width);
    if (columns.wide) columns.least.fill(Infinity); // one move per column: no veil
    this.small = this.raster(columns, OVERVIEW, this.timeline.peak.bytes * 1.05);
    this.paintBrush();
  }

  paintBrush() {
    if (!this.small) return;
    const context = this.overview.getContext('2d');
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, this.overview.clientWidth, OVERVIEW);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.small, LEFT, 0, this.width, OVERVIEW);
    const [left, right] = this.view.map((move) => LEFT + move / this.whole[1] * this.width);
    context.fillStyle = colourOf('shade');
    context.fillRect(LEFT, 0, left - LEFT, OVERVIEW);
    context.fillRect(right, 0, LEFT + this.width - right, OVERVIEW);
    context.strokeStyle = colourOf('accent');
    context.lineWidth = 1.5;
    context.strokeRect(left + 0.75, 0.75, Math.max(right - left - 1.5, 1.5), OVERVIEW - 1.5);
  }
}
