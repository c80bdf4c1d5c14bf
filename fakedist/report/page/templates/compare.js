// The page of a comparison: two curves on one axis, two steps on one axis, and tables that filter.

const LEFT = 74, RIGHT = 8, TOP = 10, BOTTOM = 34;

class CommonPlot {
  constructor(root, data) {
    this.canvas = $('canvas.main', root);
    this.status = $('.status', root);
    this.data = data;
    this.num = data.a_most.length;
    this.most = data.b_most.reduce((most, size) => Math.max(most, size), data.a_most.reduce((most, size) => Math.max(most, size), 1));
    this.at = -1;
    this.from = 0; // the visible part of the axis
    this.to = 1;
    this.held = null; // where a drag began
    this.canvas.addEventListener('pointermove', (event) => this.point(event));
    this.canvas.addEventListener('pointerleave', () => { note.hide(); });
    this.canvas.addEventListener('pointerdown', (event) => { this.held = this.share(event); });
    this.canvas.addEventListener('pointerup', (event) => this.release(event));
    this.canvas.addEventListener('dblclick', () => this.show(0, 1));
    this.canvas.addEventListener('keydown', (event) => this.key(event));
    $('.tools', root).append(...this.buttons());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  size() {
    const { width, height } = this.canvas.getBoundingClientRect(), scale = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
    }
    this.context = this.canvas.getContext('2d');
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.width = width;
    this.height = height;
  }

  buttons() {
    const pieces = this.data.meta.pieces, steps = [...new Set(pieces.map((piece) => piece.step))].filter((step) => step);
    const button = (text, from, to) => make('button', { type: 'button', onclick: () => this.show(from, to) }, text);
    const ends = (step) => pieces.filter((piece) => piece.step === step);
    return [
      button('whole run', 0, 1),
      ...steps.slice(0, 12).map((step) => button(`step ${step}`, ends(step)[0].from, ends(step).at(-1).to)),
    ];
  }

  show(from, to) {
    this.from = Math.max(0, from);
    this.to = Math.min(1, Math.max(to, from + 8 / this.num));
    this.draw();
  }

  share(event) {
    return this.from + ((event.offsetX - LEFT) / (this.width - LEFT - RIGHT)) * (this.to - this.from);
  }

  release(event) {
    const [one, other] = [this.held, this.share(event)].sort((a, b) => a - b);
    this.held = null;
    if (one !== null && (other - one) / (this.to - this.from) > 0.01) this.show(one, other);
  }

  x(share) { return LEFT + ((share - this.from) / (this.to - this.from)) * (this.width - LEFT - RIGHT); }

  y(size) { return this.height - BOTTOM - (size / (this.most * 1.04)) * (this.height - TOP - BOTTOM); }

  draw() {
    this.size();
    const context = this.context;
    context.clearRect(0, 0, this.width, this.height);
    context.font = `12px ${colourOf('font')}`;
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, this.width - LEFT - RIGHT, this.height);
    context.clip();
    this.drawPhases(context);
    context.restore();
    this.drawScale(context);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, this.width - LEFT - RIGHT, this.height);
    context.clip();
    this.drawCurve(context, 'a', colourOf('muted'), 0.28);
    this.drawCurve(context, 'b', colourOf('accent'), 0.22);
    context.restore();
    for (const side of 'ab') this.drawPeak(context, side);
    if (this.at >= 0) {
      context.fillStyle = colourOf('ink');
      context.fillRect(this.x((this.at + 0.5) / this.num), TOP, 1, this.height - TOP - BOTTOM);
    }
  }

  drawPhases(context) {
    context.textBaseline = 'top';
    let step = null, free = 0;
    for (const piece of this.data.meta.pieces) {
      const from = this.x(piece.from), to = this.x(piece.to);
      context.fillStyle = colourOf(piece.phase ? `p-${piece.phase}` : 'soft') || colourOf('soft');
      context.globalAlpha = 0.55;
      context.fillRect(from, TOP, to - from, this.height - TOP - BOTTOM);
      context.globalAlpha = 1;
      context.fillStyle = colourOf('muted');
      if (to - from > context.measureText(piece.phase).width + 6) context.fillText(piece.phase, from + 3, this.height - BOTTOM + 3);
      if (piece.step !== step) {
        step = piece.step;
        context.fillRect(from, TOP, 1, this.height - TOP);
        const text = step ? `step ${step}` : 'before', next = this.data.meta.pieces.find((each) => each.step > step);
        const room = (next ? this.x(next.from) : this.width) - from; // a short init gives its space to the first step
        if (from >= free && (step || room > context.measureText(text).width + 6)) {
          context.fillText(text, from + 3, this.height - BOTTOM + 18);
          free = from + context.measureText(text).width + 10;
        }
      }
    }
  }

  drawScale(context) {
    context.textBaseline = 'middle';
    context.textAlign = 'right';
    for (const tick of byteTicks(this.most * 1.04, 6)) {
      context.fillStyle = colourOf('line');
      context.fillRect(LEFT, this.y(tick), this.width - LEFT - RIGHT, 1);
      context.fillStyle = colourOf('muted');
      context.fillText(tickText(tick), LEFT - 6, this.y(tick));
    }
    context.textAlign = 'left';
  }

  // The area up to each column's maximum, and a line from its minimum to its maximum.
  drawCurve(context, side, colour, alpha) {
    const most = this.data[`${side}_most`], least = this.data[`${side}_least`];
    const place = (at) => this.x((at + 0.5) / this.num);
    context.beginPath();
    context.moveTo(this.x(0), this.y(0));
    for (let at = 0; at < this.num; at += 1) context.lineTo(place(at), this.y(most[at]));
    context.lineTo(this.x(1), this.y(0));
    context.closePath();
    context.globalAlpha = alpha;
    context.fillStyle = colour;
    context.fill();
    context.globalAlpha = 1;
    context.beginPath();
    for (let at = 0; at < this.num; at += 1) {
      context.lineTo(place(at), this.y(least[at]));
      context.lineTo(place(at), this.y(most[at]));
    }
    context.strokeStyle = colour;
    context.lineWidth = 1.2;
    context.stroke();
  }

  // A peak may be one pixel wide and hidden by the other run's line, so a dot marks it; A's label is to its left.
  drawPeak(context, side) {
    const most = this.data[`${side}_most`], bytes = most.reduce((one, other) => Math.max(one, other), 0);
    const x = this.x((most.indexOf(bytes) + 0.5) / this.num), y = this.y(bytes);
    if (!bytes || x < LEFT || x > this.width - RIGHT) return;
    const text = `${side.toUpperCase()} ${bytesText(bytes)}`, wide = context.measureText(text).width + 12;
    const fits = side === 'a' ? x - wide > LEFT : x + wide < this.width - RIGHT;
    context.fillStyle = colourOf(side === 'a' ? 'muted' : 'accent');
    context.beginPath();
    context.arc(x, y, 4, 0, 7);
    context.fill();
    context.textBaseline = 'middle';
    context.textAlign = (side === 'a') === fits ? 'right' : 'left';
    context.fillStyle = colourOf('ink');
    context.fillText(text, x + (context.textAlign === 'right' ? -8 : 8), Math.max(y, TOP + 6));
    context.textAlign = 'left';
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const stride = Math.max(1, Math.round(this.num * (this.to - this.from) * (event.shiftKey ? 0.05 : 0.005)));
    const [first, last] = [Math.floor(this.from * this.num), Math.ceil(this.to * this.num) - 1];
    this.read(Math.max(first, Math.min(last, Math.max(this.at, first) + by * stride)));
  }

  point(event) {
    const share = this.share(event);
    if (share < this.from || share > this.to) return;
    this.read(Math.min(this.num - 1, Math.floor(share * this.num)));
    note.show(event.clientX, event.clientY, make('div', {}, this.text()));
  }

  read(at) {
    this.at = at;
    this.draw();
    this.status.textContent = this.text();
  }

  text() {
    const share = (this.at + 0.5) / this.num;
    const piece = this.data.meta.pieces.find((each) => each.from <= share && share <= each.to);
    const [a, b] = [this.data.a_most[this.at], this.data.b_most[this.at]];
    const where = piece ? `${piece.step ? `step ${piece.step}` : 'before the first step'}${piece.phase ? `, ${piece.phase}` : ''}: ` : '';
    return `${where}A ${bytesText(a)}, B ${bytesText(b)}, ${b > a ? '+' : ''}${bytesText(b - a)}`;
  }
}

// The steps of both runs: one axis, as long as the longer one, and one view.
async function stepPlots() {
  const plots = [];
  for (const [at, holder] of $$('.step-numbers').entries()) {
    plots.push(new KernelPlot($$('.step-of')[at], await unpack(holder.textContent.trim())));
    holder.remove();
  }
  const longest = Math.max(...plots.map((plot) => plot.us(plot.whole[1])));
  for (const plot of plots) {
    plot.whole = [0, longest / plot.data.meta.tick_us];
    plot.setView(...plot.whole);
    plot.moved = (view) => { for (const other of plots) if (other !== plot) other.follow(view); };
  }
  return plots;
}

async function start() {
  const data = await unpack($('#numbers').textContent.trim());
  $('#numbers').remove();
  const steps = await stepPlots();
  if (steps.length) steps[0].wireButtons($('#steps'));
  for (const table of $$('table.live')) wireTable(table, data);
  wireScrolls();
  const plot = new CommonPlot($('#timeline'), data);
  const redraw = (now) => {
    plot.draw();
    for (const step of steps) { if (now) step.paint(); else step.draw(); }
  };
  wireTheme(redraw);
  wirePrint(redraw);
  window.fakedist = { plot, data, steps };
  document.documentElement.dataset.ready = 'yes';
}

start().catch((error) => {
  $('#trouble').hidden = false;
  $('#trouble').textContent = `The drawing of this page needs a browser from 2023 or later (${error.message}); all tables are below.`;
});
