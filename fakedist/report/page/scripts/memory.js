// The memory timeline: the run's figure, drawn again for each view from every allocation and free.

import { lastAtMost } from './axis.js';
import { areaOf, areasOf, floorsOf, outline } from './blocks.js';
import { $, colourOf, make, note, widthOf } from './dom.js';
import { columnsOf, within } from './sampling.js';
import { bytesText, countText, cut, linesWithin, plain } from './text.js';
import { ZoomChart } from './zoom.js';

const OVERVIEW_COLUMNS = 600;
const LEAST_MOVES = 8;
const FIRST_SHARE = 25; // the first view is this part of the run, around the peak
const NARROWEST_SPAN = 3; // pixels
const LEAST_BLOCK = 2; // pixels of height, to be drawn as a block
const MOST_CORNERS = 30_000; // of blocks in a view
const BAND = 0.065; // height of a row of names above the plot, as a share of the plot's
const BAND_PIXELS = 24;
const MOST_BANDS = 3; // rows of the script's phases: those within phases lie above them
const MARGINS = 84; // pixels left and right of the plot
const GAP = 9; // pixels between a moment and its label
const SVG = 'http://www.w3.org/2000/svg';

export class MemoryChart extends ZoomChart {
  constructor(root, data, timeline, axes, stacks = null) {
    super(root, data.meta.figures.timeline, data.meta.style, { whole: axes[0].whole, least: LEAST_MOVES });
    this.data = data;
    this.timeline = timeline;
    this.axes = axes;
    this.stacks = stacks;
    this.axis = axes[0];
    this.pinned = $('.pinned', root);
    this.status = $('.status', root);
    this.block = -1; // the block that is pinned
    this.moment = -1; // the move that is pinned
    this.marks = new Map(); // moments with a name, and their lines
    const parts = new Map(this.figure.data.map((trace) => [trace.meta, trace]));
    this.unit = this.figure.layout.yaxis.ticksuffix.trim();
    this.size = { TiB: 2 ** 40, GiB: 2 ** 30, MiB: 2 ** 20, KiB: 2 ** 10, B: 1 }[this.unit];
    this.showReserved = parts.get('reserved').visible !== 'legendonly';
    $('input.reserved', root).checked = this.showReserved;
    this.refusal = data.meta.refusal; // the first request that did not fit
    this.view = this.firstView;
    this.listeners.push(() => this.announce());
    this.cursor = $('.holder', root).appendChild(make('div', { class: 'cursor', hidden: '' }));
    this.life = $('.holder', root).appendChild(document.createElementNS(SVG, 'svg'));
    this.life.setAttribute('class', 'life');
    this.life.append(document.createElementNS(SVG, 'path'), document.createElementNS(SVG, 'path'));
  }

  get firstMove() {
    return this.refusal?.move ?? this.timeline.peak.move;
  }

  get firstView() {
    return this.around(this.firstMove, this.timeline.numMoves / FIRST_SHARE);
  }

  place(move) {
    return this.axis.place(move);
  }

  at(place) {
    return this.axis.move(place);
  }

  around(move, width) {
    const wide = Math.min(Math.max(width, 400), this.whole[1] - this.whole[0]);
    const from = Math.min(Math.max(move - wide / 2, this.whole[0]), this.whole[1] - wide);
    return [from, from + wide];
  }

  useAxis(name) {
    const axis = this.axes.find((each) => each.name === name);
    if (!axis || axis === this.axis) return;
    this.axis = axis;
    this.whole = axis.whole;
    this.overview = null;
    const [from, to] = this.view;
    const isSeen = from < this.whole[1] && to > this.whole[0];
    if (isSeen) this.setView(Math.max(from, this.whole[0]), Math.min(to, this.whole[1]));
    else this.setView(...this.whole);
  }

  // ---- drawing

  columns() {
    const { timeline, axis, whole } = this;
    const pixels = Math.max(Math.round(this.width - 90), 50);
    this.overview ||= columnsOf(timeline, axis, whole, OVERVIEW_COLUMNS);
    this.seen = columnsOf(timeline, axis, this.view, pixels);
    return within(this.overview, this.seen);
  }

  traces() {
    const columns = this.columns();
    const end = [axisEnd(this.axis, this.whole)];
    const x = [...columns.place, ...end];
    const scaled = (bytes) =>
      Float64Array.from({ length: x.length }, (_, at) => bytes[Math.min(at, bytes.length - 1)] / this.size);
    const { peak } = this.timeline;
    const y = { least: columns.least, veil: columns.total, allocated: columns.total, reserved: columns.reserved };
    const traces = this.figure.data.map((trace) => {
      if (trace.meta === 'peak')
        return {
          ...trace,
          x: [this.place(peak.move)],
          y: [peak.bytes / this.size],
          hoverinfo: 'none',
          hovertemplate: undefined,
        };
      const bytes = y[trace.meta] || columns.held[trace.meta];
      const visible = trace.meta === 'reserved' ? this.showReserved : true;
      return { ...trace, x, y: scaled(bytes), visible, hoverinfo: 'none', hovertemplate: undefined };
    });
    if (columns.after) {
      const after = { type: 'scatter', mode: 'lines', hoverinfo: 'none', x, y: scaled(columns.after) };
      const lines = [
        ['panel', 5],
        ['accent', 2],
      ];
      for (const [name, width] of lines) traces.push({ ...after, line: { color: colourOf(name), width, shape: 'hv' } });
      const dotted = { color: colourOf('accent'), width: 2, shape: 'hv', dash: 'dot' };
      if (columns.afterLeast) traces.push({ ...after, y: scaled(columns.afterLeast), line: dotted });
    }
    return traces;
  }

  // What would be held after every move with the changes that are switched on; null without one.
  showAfter(outcome) {
    const isSpan = outcome && outcome.least !== outcome.most;
    this.timeline.after = outcome?.most.after;
    this.timeline.afterLeast = isSpan ? outcome.least.after : null; // if the changes save the most that they can
    this.outcome = outcome;
    this.overview = null;
    $('.legend .after', this.root).hidden = !outcome;
    this.refresh();
  }

  layout() {
    const layout = super.layout();
    const whole = this.whole.map((move) => this.place(move));
    const { bytes } = this.timeline.peak;
    const rangeslider = {
      visible: true,
      thickness: 0.13,
      range: whole,
      bordercolor: colourOf('line'),
      borderwidth: 1,
      yaxis: { rangemode: 'fixed', range: [0, (bytes * 1.05) / this.size] },
    };
    return {
      ...layout,
      showlegend: false,
      hovermode: false,
      margin: { l: MARGINS - 10, r: 10, t: 30 + this.bandRows * BAND_PIXELS, b: 8 },
      height: (this.width < 560 ? 380 : 470) + this.bandRows * BAND_PIXELS,
      xaxis: {
        ...layout.xaxis,
        rangeslider,
        title: { text: '' },
        ticksuffix: this.axis.suffix,
        exponentformat: 'none',
        separatethousands: true,
        nticks: Math.max(3, Math.floor(this.width / 130)),
      },
      yaxis: { ...layout.yaxis, range: [0, this.ceiling() / this.size], fixedrange: true, nticks: 8 },
      shapes: [...this.spans(), ...this.named(), ...this.blocks(), ...this.capacity(), ...this.refused()],
      annotations: this.annotations(),
    };
  }

  ceiling() {
    const { total, reserved, after } = columnsOf(this.timeline, this.axis, this.view, 300);
    const most = (values) => values.reduce((one, other) => Math.max(one, other), 1);
    return Math.max(most(total), after ? most(after) : 0, this.showReserved ? most(reserved) : 0) * 1.06;
  }

  annotations() {
    const marked = [{ ...this.timeline.peak, text: 'peak' }];
    if (this.outcome) {
      const text = `with the changes${this.timeline.afterLeast ? ' at most' : ''}`;
      marked.push({ ...this.outcome.most, text, colour: colourOf('accent') });
    }
    const [from, to] = this.view;
    const shown = marked
      .filter(({ move }) => move >= from && move < to)
      .map(({ move, bytes, text, colour }) => ({
        ...this.labelAt(move, `${text} ${bytesText(bytes)}`),
        y: bytes / this.size,
        opacity: 0.9,
        ...(colour && { font: { color: colour } }),
      }));
    return [...shown, ...this.refusalText()];
  }

  // A label on that side of a moment where it has room, in as many lines as it takes.
  labelAt(move, text) {
    const [from, to, x] = [...this.view, move].map((each) => this.place(each));
    const share = (x - from) / (to - from || 1);
    const across = this.width - MARGINS;
    const font = `bold 13px ${colourOf('font')}`;
    const isRight = share > 0.5 && widthOf(text, font) > (1 - share) * across - 2 * GAP;
    const room = (isRight ? share : 1 - share) * across - 2 * GAP;
    const lines = linesWithin(text, room, (part) => widthOf(part, font));
    return {
      x,
      text: `<b>${lines.map(plain).join('<br>')}</b>`,
      showarrow: false,
      align: isRight ? 'right' : 'left',
      xanchor: isRight ? 'right' : 'left',
      xshift: isRight ? -GAP : GAP,
      bgcolor: colourOf('panel'),
    };
  }

  // The outlines of single blocks where there are few enough: two shapes, of which one has a tint to tell neighbours
  // apart.
  blocks() {
    const { seen, size, timeline } = this;
    const pixelBytes = this.ceiling() / (this.width < 560 ? 250 : 340);
    const areas = seen && areasOf(timeline, seen, LEAST_BLOCK * pixelBytes, MOST_CORNERS);
    if (!areas?.length) return [];
    const end = axisEnd(this.axis, [0, seen.edges[seen.num]]);
    const x = (column) => number(column < seen.num ? seen.place[column] : end);
    const y = (bytes) => number(bytes / size);
    const paths = [[], []];
    for (const area of areas) paths[area.block % 2].push(outline(area, x, y));
    const line = { width: 0.6, color: colourOf('panel') };
    const fills = ['rgba(0, 0, 0, 0)', colourOf('tint')];
    return paths.flatMap((path, at) =>
      path.length ? [{ type: 'path', path: spaced(path.join('')), line, fillcolor: fills[at], layer: 'above' }] : [],
    );
  }

  // Where memory did not suffice for the first time.
  refused() {
    if (!this.isRefusalSeen) return [];
    const x = this.place(this.refusal.move);
    const line = { color: colourOf('bad'), width: 2, dash: 'dash' };
    return [{ type: 'line', x0: x, x1: x, yref: 'paper', y0: 0, y1: 1, line }];
  }

  get isRefusalSeen() {
    const [from, to] = this.view;
    return Boolean(this.refusal) && this.refusal.move >= from && this.refusal.move <= to;
  }

  refusalText() {
    if (!this.isRefusalSeen) return [];
    const label = this.labelAt(this.refusal.move, this.refusal.text);
    const colour = { opacity: 0.94, font: { color: colourOf('bad') } };
    return [{ ...label, y: 0.04, yref: 'paper', yanchor: 'bottom', ...colour }];
  }

  capacity() {
    const bytes = this.data.meta.capacity;
    if (!bytes || bytes > this.ceiling()) return [];
    const at = bytes / this.size;
    const label = { text: `GPU memory ${bytesText(bytes)}`, textposition: 'end', font: { color: colourOf('bad') } };
    const across = { xref: 'paper', x0: 0, x1: 1, y0: at, y1: at };
    return [{ type: 'line', ...across, line: { color: colourOf('bad'), width: 1.5 }, label }];
  }

  // Phases behind the curves, with their names above them where there is room.
  spans() {
    const { span_move: first, span_step: step, span_phase: phase, meta } = this.data;
    if (!first) return [];
    const [from, to] = this.view.map((move) => this.place(move));
    const perPixel = (to - from) / Math.max(this.width - 84, 1);
    const shapes = [];
    for (let at = 0; at < first.length; at += 1) {
      const x0 = Math.max(this.place(first[at]), from);
      const x1 = Math.min(this.place(at + 1 < first.length ? first[at + 1] : this.timeline.numMoves), to);
      const pixels = (x1 - x0) / perPixel;
      if (pixels < NARROWEST_SPAN) continue;
      const name = meta.phases[phase[at]];
      const text = [`step ${step[at]} ${name}`, name, name.slice(0, 3)].find((each) => each.length * 6.4 + 8 < pixels);
      const both = {
        type: 'rect',
        x0,
        x1,
        yref: 'paper',
        layer: 'below',
        fillcolor: colourOf(`p-${name}`),
        line: { width: 0 },
      };
      const label = { text: plain(text || ''), textposition: 'middle left', font: { size: 12 } };
      shapes.push({ ...both, y0: 0, y1: 1, opacity: 0.35 }, { ...both, y0: 1.01, y1: 1.065, label });
    }
    return shapes;
  }

  get bandRows() {
    return Math.min(
      (this.data.named_depth || []).reduce((most, depth) => Math.max(most, depth + 1), 0),
      MOST_BANDS,
    );
  }

  // The script's phases: their names in rows above the steps' phases, and a line where each begins and ends.
  named() {
    const { named_begin: begin, named_end: end, named_depth: depth, meta } = this.data;
    if (!begin) return [];
    const [from, to] = this.view.map((move) => this.place(move));
    const perPixel = (to - from) / Math.max(this.width - 84, 1);
    const shapes = [];
    for (let at = 0; at < begin.length; at += 1) {
      const x0 = Math.max(this.place(begin[at]), from);
      const x1 = Math.min(this.place(end[at]), to);
      const pixels = (x1 - x0) / perPixel;
      if (pixels < NARROWEST_SPAN || depth[at] >= MOST_BANDS) continue;
      const y0 = 1.01 + BAND * (depth[at] + 1);
      const name = meta.named[at];
      const text = name.length * 6.4 + 8 < pixels ? name : name.slice(0, Math.max(Math.floor((pixels - 8) / 6.4), 0));
      const line = { color: colourOf('muted'), width: 1 };
      const label = { text: plain(text), textposition: 'middle left', font: { size: 12 } };
      const box = { y0, y1: y0 + BAND - 0.01, fillcolor: colourOf('soft'), line, label };
      shapes.push({ type: 'rect', x0, x1, yref: 'paper', layer: 'below', ...box });
      const edge = { type: 'line', yref: 'paper', y0: 0, y1: y0, line: { ...line, dash: 'dot' } };
      for (const x of [x0, x1]) if (x > from && x < to) shapes.push({ ...edge, x0: x, x1: x });
    }
    return shapes;
  }

  // The innermost of the script's phases at a moment, as the start of a sentence.
  namedAt(move) {
    const { named_begin: begin = [], named_end: end, meta } = this.data;
    for (let at = begin.length - 1; at >= 0; at -= 1)
      if (begin[at] <= move && move < end[at]) return `${cut(meta.named[at], 60)}, `;
    return '';
  }

  paint(width) {
    this.cursor.hidden = true; // the pointer is at another moment now
    const drawn = super.paint(width);
    this.markBlock();
    this.placeMarks();
    return drawn;
  }

  announce() {
    const [from, to] = this.view.map(Math.round);
    this.status.textContent = `allocations and frees ${countText(from)} to ${countText(to)} of ${countText(this.timeline.numMoves)}`;
  }

  // ---- the moment and the block that are pointed at

  // The column of a place, and the block that lies at a height there.
  found({ x, y }) {
    const { seen, timeline } = this;
    const row = lastAtMost(seen.place, x);
    const move = seen.where[row];
    let height = y * this.size;
    for (let c = 0; c < seen.held.length && height >= 0; c += 1) {
      if (height < seen.held[c][row]) return { move, block: timeline.blockAt(move, c, height).block };
      height -= seen.held[c][row];
    }
    return { move, block: -1 };
  }

  point(spot, event) {
    const { move, block } = this.found(spot);
    this.markMove(move);
    this.markBlock(block >= 0 ? block : this.block);
    note.show(event.clientX, event.clientY, ...this.describe(move, block, true));
  }

  leave() {
    super.leave();
    this.cursor.hidden = true;
    this.markBlock();
  }

  click(spot) {
    const { move, block } = this.found(spot);
    this.pin(move, block);
  }

  pixel(move) {
    const { xaxis } = this.holder._fullLayout;
    return xaxis._offset + xaxis.d2p(this.place(move));
  }

  markMove(move) {
    const { _size: size } = this.holder._fullLayout;
    this.cursor.hidden = false;
    Object.assign(this.cursor.style, { left: `${this.pixel(move)}px`, top: `${size.t}px`, height: `${size.h}px` });
  }

  // Name a moment: a line through the plot with a letter. A move below 0 takes it away.
  mark(name, move) {
    const old = this.marks.get(name);
    if (move < 0) {
      old?.line.remove();
      this.marks.delete(name);
      return;
    }
    const line = old?.line || $('.holder', this.root).appendChild(make('div', { class: 'mark', hidden: '' }, name));
    this.marks.set(name, { move, line });
    this.placeMarks();
  }

  placeMarks() {
    const { _size: size } = this.holder._fullLayout || {};
    for (const { move, line } of this.marks.values()) {
      const left = size ? this.pixel(move) : -1;
      line.hidden = !size || left < size.l || left > size.l + size.w;
      if (!line.hidden) Object.assign(line.style, { left: `${left}px`, top: `${size.t}px`, height: `${size.h}px` });
    }
  }

  // A bar above the plot from a block's allocation to its free, and the outline of its area.
  markBlock(block = this.block) {
    const { holder, life } = this;
    const [bar, area] = life.children;
    for (const path of [bar, area]) path.setAttribute('d', '');
    if (block < 0 || !holder._fullLayout || !this.seen) return;
    const { made, freed, bytes } = this.timeline.block(block);
    const { _size: size, yaxis } = holder._fullLayout;
    const inPlot = (at) => Math.min(Math.max(at, size.l), size.l + size.w);
    const [left, right] = [inPlot(this.pixel(made)), inPlot(this.pixel(freed))];
    if (freed < this.view[0] || made > this.view[1]) return;
    bar.setAttribute('d', `M${left} ${size.t}H${Math.max(right, left + 2)}v4H${left}Z`);
    const { seen } = this;
    const x = (column) => inPlot(this.pixel(column < seen.num ? seen.edges[column] : seen.edges[seen.num]));
    const y = (at) => yaxis._offset + Math.max(yaxis.d2p(at / this.size), 0);
    const floors = floorsOf(this.timeline, seen, block);
    if (floors.floors.length) area.setAttribute('d', outline(areaOf(floors, bytes), x, y));
  }

  describe(move, block, brief) {
    if (move < 0) return [];
    const { timeline } = this;
    const state = timeline.state(move);
    const span = timeline.span(move);
    const total = state.reduce((sum, bytes) => sum + bytes, 0);
    const where = span ? `step ${span.step}, ${span.phase}, ` : '';
    const head = make(
      'p',
      { class: 'head' },
      make('b', {}, bytesText(total)),
      ` allocated · ${this.namedAt(move)}${where}event ${countText(move)}`,
    );
    const list = make('ul', { class: 'chips' });
    timeline.categories.forEach((name, c) => {
      if (!state[c]) return;
      const chip = make('i', { class: `chip k-${timeline.colours[c]}` });
      list.append(make('li', {}, chip, `${cut(name, 60)} ${bytesText(state[c])}`));
    });
    return [head, block >= 0 ? this.describeBlock(timeline.block(block), brief) : null, list].filter(Boolean);
  }

  describeBlock(block, brief) {
    const shown = (text) => (brief ? cut(text, 120) : text);
    const end = block.freed < this.timeline.numMoves ? `to ${countText(block.freed)}` : 'to the end';
    const rows = [
      ['block', `${bytesText(block.bytes)} ${block.category === block.line ? '' : cut(block.category, 60)}`.trim()],
      ['layer', shown(block.layer)],
      ['operation', shown(block.operation)],
      ['line', shown(block.line)],
      ['alive', `from event ${countText(block.made)} ${end}`],
    ];
    const list = make('dl', {});
    for (const [name, value] of rows) if (value) list.append(make('dt', {}, name), make('dd', {}, value));
    return list;
  }

  pin(move, block = -1) {
    this.block = block;
    this.moment = move;
    const stack = block >= 0 && this.stacks ? this.stackOf(block) : null;
    const picks = this.picked && move >= 0 ? this.picks() : null;
    const parts = [...this.describe(move, block, false), picks, stack];
    this.pinned.replaceChildren(...parts.filter(Boolean));
    this.markBlock();
  }

  // The stack that allocated a block, innermost call first; the job's own lines stand out.
  stackOf(block) {
    const frames = this.stacks.frames(this.timeline.block(block).stack);
    if (!frames.length) return null;
    const list = make('ol', { class: 'stack' });
    for (const frame of frames) {
      const attributes = this.stacks.isLibrary(frame) ? {} : { class: 'job' };
      list.append(make('li', attributes, this.stacks.text(frame)));
    }
    const calls = `${countText(frames.length)} call${frames.length === 1 ? '' : 's'}`;
    return make('details', { open: '', class: 'stack' }, make('summary', {}, `its stack, ${calls}`), list);
  }

  // Buttons that take the pinned moment for the graph of stacks.
  picks() {
    const button = (name) => make('button', { type: 'button', onclick: () => this.pick(name) }, `take as ${name}`);
    return make('div', { class: 'tools' }, 'this moment by stack:', button('A'), button('B'));
  }

  pick(name) {
    if (this.moment < 0 || !this.picked) return;
    this.mark(name, this.moment);
    this.picked(name, this.moment);
  }

  // ---- moving

  wire() {
    super.wire();
    const box = $('input.reserved', this.root);
    box.addEventListener('change', () => {
      this.showReserved = box.checked;
      this.refresh();
    });
    const choice = $('select.axis', this.root);
    choice.replaceChildren(...this.axes.map(({ name, title }) => make('option', { value: name }, title)));
    choice.value = this.axis.name;
    choice.addEventListener('change', () => this.useAxis(choice.value));
    this.announce();
  }

  acts() {
    const steps = [...new Set(this.data.span_step || [])];
    const { peak, numMoves } = this.timeline;
    const toPeak = () => {
      this.setView(...this.around(peak.move, numMoves / 200));
      this.pin(peak.move);
    };
    const toSteps = steps.map((step) => [`step ${step}`, () => this.showStep(step)]);
    const toRefusal = () => {
      this.setView(...this.around(this.refusal.move, numMoves / 200));
      this.pin(this.refusal.move);
    };
    const refusal = this.refusal ? { refusal: toRefusal } : {};
    return { ...super.acts(), peak: toPeak, ...refusal, ...Object.fromEntries(toSteps) };
  }

  keys() {
    const { peak, refusal } = this.acts();
    return { ...super.keys(), p: peak, r: refusal, ...this.momentKeys() };
  }

  momentKeys() {
    const by = { ',': () => this.step(-1), '.': () => this.step(1) };
    return { ...by, '[': () => this.pick('A'), ']': () => this.pick('B') };
  }

  // To the move before or after the one that was described last.
  step(by) {
    const now = this.last ?? this.timeline.peak.move;
    this.last = Math.min(Math.max(now + by, 0), this.timeline.numMoves - 1);
    if (this.last < this.view[0] || this.last >= this.view[1])
      this.setView(...this.around(this.last, this.view[1] - this.view[0]));
    this.pin(this.last, Math.abs(this.timeline.blockOf[this.last]) - 1);
    this.markMove(this.last);
  }

  showStep(step) {
    const { span_step: steps, span_move: first } = this.data;
    const from = first[steps.indexOf(step)];
    const next = steps.findIndex((each) => each > step);
    this.setView(from, next < 0 ? this.timeline.numMoves : first[next]);
  }

  // Show one block: its whole lifetime and a margin.
  showBlock(number) {
    const { made, freed } = this.timeline.block(number);
    const margin = Math.max(20, (freed - made) * 0.15);
    this.setView(made - margin, freed + margin);
    this.pin(made, number);
  }
}

const axisEnd = (axis, whole) => axis.place(whole[1]);
// Nine digits are less than a pixel of any view.
const number = (value) => Number(value.toPrecision(9));
// plotly reads a path whose parts are separated.
const spaced = (path) => path.replace(/(?<=\d)(?=[MHVZ])/g, ' ');
