// The timed step kernel by kernel: the run's figure, drawn again for each view from all of its bars.

import { $, colourOf, make, note } from './dom.js';
import { barsInView } from './sampling.js';
import { countText, cut, plain, shortName, usText } from './text.js';
import { ZoomChart } from './zoom.js';

const LEAST_TICKS = 16;
const LEAST_LABELLED = 34; // pixels
const PER_LETTER = 6.6;
const MARGIN = 84;
const NEAR = 3; // pixels
// Of a lane. Collectives of unknown duration are short, so that they do not hide the kernels between them.
const TALL = 0.84;
const SHORT = 0.36;

export class KernelChart extends ZoomChart {
  constructor(root, data) {
    super(root, data.meta.figures.kernels, data.meta.style, {
      whole: [0, endOf(data)],
      least: LEAST_TICKS * data.meta.tick_us,
    });
    this.data = data;
    this.status = $('.status', root);
    const { bar_stream: streams, run_depth: depths } = data;
    this.lanes = data.meta.streams.map(() => []);
    for (let bar = 0; bar < streams.length; bar += 1) this.lanes[streams[bar]].push(bar);
    this.firstLane = Math.max(...this.figure.layout.yaxis.tickvals) + 1 - this.lanes.length;
    this.layers = Array.from({ length: this.firstLane - 1 }, () => []);
    for (let run = 0; run < depths.length; run += 1) this.layers[depths[run]]?.push(run);
    if (data.meta.merged) {
      const num = countText(data.meta.num_kernels);
      $('.merged', root).textContent = ` Of ${num} kernels, neighbouring ones are merged into one bar.`;
    }
    this.listeners.push(() => this.announce());
    this.announce();
  }

  us(ticks) {
    return ticks * this.data.meta.tick_us;
  }

  // The view is in microseconds, the axis in milliseconds, the data in ticks.
  place(us) {
    return us / 1e3;
  }

  at(ms) {
    return ms * 1e3;
  }

  get ticks() {
    return this.view.map((us) => us / this.data.meta.tick_us);
  }

  show(view) {
    super.show(view);
    this.announce();
  }

  announce() {
    const [from, to, end] = [...this.view, this.whole[1]].map(usText);
    this.status.textContent = `${from} to ${to} of ${end}`;
  }

  // Ticks of a pixel.
  get perPixel() {
    const [from, to] = this.ticks;
    return (to - from) / Math.max(this.width - MARGIN - 10, 1);
  }

  // ---- drawing

  traces() {
    const { data, ticks: view, perPixel } = this;
    const { meta } = data;
    const parts = new Map(this.figure.data.map((trace) => [trace.meta, []]));
    const kindColour = (kind) => colourOf(`p-${meta.kinds[kind]}`);
    const parted = barsInView(data.part_start, data.part_length, data.part_kind.keys(), view, perPixel);
    for (const [start, length, part] of parted) {
      const kind = data.part_kind[part];
      parts.get('phase').push({ start, length, row: 0, text: meta.kinds[kind], colour: kindColour(kind) });
    }
    this.layers.forEach((runs, depth) => {
      for (const [start, length, run] of barsInView(data.run_start, data.run_length, runs, view, perPixel)) {
        const text = shortName(meta.layers[data.run_layer[run]]);
        parts.get('layers').push({ start, length, row: 1 + depth, text, colour: kindColour(data.run_kind[run]) });
      }
    });
    this.lanes.forEach((bars, lane) => {
      const row = this.firstLane + lane;
      for (const isKnown of [1, 0]) {
        const own = bars.filter((bar) => data.bars_known[data.bar_kind[bar]] === isKnown);
        for (const [start, length, bar] of barsInView(data.bar_start, data.bar_length, own, view, perPixel * 1.5)) {
          const of = data.bar_kind[bar];
          const text = meta.kernels[data.bars_name[of]];
          const family = meta.families[data.bars_family[of]];
          if (!parts.has(family)) parts.set(family, []);
          const shape = isKnown ? { row, width: TALL } : { row: row + (TALL - SHORT) / 2, width: SHORT };
          parts.get(family).push({ start, length, text, ...shape });
        }
      }
    });
    return this.figure.data.map((trace) => this.trace(trace, parts.get(trace.meta)));
  }

  trace(trace, bars) {
    const { perPixel, ticks: view } = this;
    const base = bars.map(({ start }) => Math.max(start, view[0]));
    const end = bars.map(({ start, length }) => Math.min(start + Math.max(length, perPixel), view[1]));
    const text = bars.map((bar, at) => {
      const pixels = (end[at] - base[at]) / perPixel;
      return pixels < LEAST_LABELLED ? '' : plain(cut(bar.text, Math.floor((pixels - 8) / PER_LETTER)));
    });
    return {
      ...trace,
      base: base.map((tick) => this.place(this.us(tick))),
      x: end.map((tick, at) => this.place(this.us(tick - base[at]))),
      y: bars.map(({ row }) => row),
      width: bars.map(({ width = TALL }) => width),
      text,
      textposition: 'inside',
      insidetextanchor: 'start',
      textangle: 0,
      constraintext: 'none',
      hoverinfo: 'none',
      hovertemplate: undefined,
      hovertext: undefined,
      marker: bars[0]?.colour ? { ...trace.marker, color: bars.map(({ colour }) => colour) } : trace.marker,
    };
  }

  layout() {
    const layout = super.layout();
    const isNarrow = this.width < 560;
    return {
      ...layout,
      showlegend: false,
      hovermode: false,
      margin: { l: isNarrow ? 8 : MARGIN, r: 10, t: 4, b: 28 },
      height: layout.height - 78,
      xaxis: {
        ...layout.xaxis,
        title: { text: '' },
        nticks: Math.max(3, Math.floor(this.width / 130)),
        zeroline: false,
      },
      yaxis: { ...layout.yaxis, showticklabels: !isNarrow, ticks: '' },
    };
  }

  // ---- what is pointed at

  point(spot, event) {
    const row = Math.round(spot.y);
    const tick = this.at(spot.x) / this.data.meta.tick_us;
    const content = row < this.firstLane ? this.aboutLayer(row, tick) : this.aboutBar(row - this.firstLane, tick);
    if (content) note.show(event.clientX, event.clientY, ...content);
    else note.hide();
  }

  aboutBar(lane, tick) {
    const { data } = this;
    const { meta } = data;
    const bar = nearest(data.bar_start, data.bar_length, this.lanes[lane] || [], tick, NEAR * this.perPixel);
    if (bar < 0) return null;
    const of = data.bar_kind[bar];
    const num = data.bar_num[bar];
    const name = meta.kernels[data.bars_name[of]];
    const long = data.bars_known[of] ? usText(this.us(data.bar_length[bar])) : 'duration not known';
    const what = [meta.families[data.bars_family[of]], meta.kinds[data.bars_kind[of]]].join(', ');
    return [
      make('p', { class: 'head' }, make('b', {}, num > 1 ? `${countText(num)} kernels` : name), `, ${long}`),
      num > 1 ? make('p', {}, `the longest: ${name}`) : null,
      make('p', {}, `${what}, at ${usText(this.us(data.bar_start[bar]))}`),
      make('p', {}, meta.layers[data.bars_layer[of]] || '(outside of modules)'),
    ].filter(Boolean);
  }

  aboutLayer(row, tick) {
    const { data } = this;
    const { meta } = data;
    const isPhase = row === 0;
    const [start, length] = isPhase ? [data.part_start, data.part_length] : [data.run_start, data.run_length];
    const rows = isPhase ? [...data.part_kind.keys()] : this.layers[row - 1] || [];
    const found = nearest(start, length, rows, tick, 0);
    if (found < 0) return null;
    const kind = meta.kinds[(isPhase ? data.part_kind : data.run_kind)[found]];
    const name = isPhase ? kind : meta.layers[data.run_layer[found]];
    const head = make('p', { class: 'head' }, make('b', {}, name), `, ${usText(this.us(length[found]))}`);
    return isPhase ? [head] : [head, make('p', {}, kind)];
  }
}

// Kernels that end after the step's recorded end are shown too.
function endOf({ meta, bar_start: start, bar_length: length }) {
  let end = meta.step_us / meta.tick_us;
  for (let bar = 0; bar < start.length; bar += 1) end = Math.max(end, start[bar] + length[bar]);
  return end * meta.tick_us;
}

// The bar at a moment, or the nearest within reach; -1 without one.
export function nearest(start, length, rows, tick, reach) {
  let best = -1;
  let away = reach;
  for (const row of rows) {
    if (start[row] > tick + reach) break;
    const distance = Math.max(start[row] - tick, tick - start[row] - length[row], 0);
    if (distance > away) continue;
    best = row;
    away = distance;
    if (!distance) break;
  }
  return best;
}
