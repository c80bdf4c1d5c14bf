// The timed step kernel by kernel: the run's figure, drawn again for each view from all of its bars.

import { coverOf, partsOf } from './cover.js';
import { $, $$, colourOf, make, note } from './dom.js';
import { barsBetween, barsOf, barsWith, layersOf, sumOf } from './lanes.js';
import { barsInView } from './sampling.js';
import { countText, cut, plain, shortName, usText } from './text.js';
import { ZoomChart } from './zoom.js';

const LEAST_TICKS = 16;
const LEAST_LABELLED = 34; // pixels
const PER_LETTER = 6.6;
const MARGIN = 84;
const WIDEST_MARGIN = 230;
const NEAR = 3; // pixels
// Of a lane. Collectives of unknown duration are short, so that they do not hide the kernels between them.
const TALL = 0.84;
const SHORT = 0.36;
const PATH = 0.22;
const MOST_NAMES = 6; // of a sum

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
    const { range_lane: rangeLanes } = data;
    this.ranges = Array.from({ length: rangeLanes.reduce((most, lane) => Math.max(most, lane + 1), 0) }, () => []);
    for (let range = 0; range < rangeLanes.length; range += 1) this.ranges[rangeLanes[range]].push(range);
    this.host = data.meta.threads.map(() => []);
    for (let bar = 0; bar < data.host_of.length; bar += 1) this.host[data.hosts_lane[data.host_of[bar]]].push(bar);
    this.firstHost = this.firstLane - this.host.length;
    this.firstRange = this.firstHost - this.ranges.length;
    this.layers = Array.from({ length: this.firstRange - 1 }, () => []);
    for (let run = 0; run < depths.length; run += 1) this.layers[depths[run]]?.push(run);
    this.calls = data.meta.families.indexOf('communication');
    const computing = (bar) => data.bars_family[data.bar_kind[bar]] !== this.calls;
    this.cover = coverOf(data.bar_start, data.bar_length, [...streams.keys()].filter(computing));
    if (data.meta.merged) {
      const num = countText(data.meta.num_kernels);
      $('.merged', root).textContent = ` Of ${num} kernels, neighbouring ones are merged into one bar.`;
    }
    this.listeners.push(() => this.announce());
    this.announce();
    this.pinned = $('.kept', root);
    this.seek = $('input.seek', root);
    this.told = $('.told', root);
    this.found = []; // bars that a search or a row of a table means
    this.current = -1; // the one of them that was gone to
    this.bar = -1; // the one that is pinned
    this.onPath = false;
  }

  us(ticks) {
    return ticks * this.data.meta.tick_us;
  }

  get margin() {
    const { streams, threads } = this.data.meta;
    const letters = [...streams, ...threads].reduce((most, title) => Math.max(most, title.length), 0);
    return Math.min(Math.max(MARGIN, 14 + letters * PER_LETTER), WIDEST_MARGIN, this.width / 4);
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
    return (to - from) / Math.max(this.width - this.margin - 10, 1);
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
    this.ranges.forEach((ranges, lane) => {
      const row = this.firstRange + lane;
      for (const [start, length, range] of barsInView(data.range_start, data.range_length, ranges, view, perPixel)) {
        parts.get('ranges').push({ start, length, row, text: meta.ranges[data.range_name[range]] });
      }
    });
    this.host.forEach((bars, lane) => {
      const row = this.firstHost + lane;
      for (const [start, length, bar] of barsInView(data.host_start, data.host_length, bars, view, perPixel)) {
        const of = data.host_of[bar];
        const colour = data.hosts_waits[of] ? colourOf('waiting') : kindColour(data.hosts_kind[of]);
        const text = data.hosts_waits[of] ? '' : meta.host_names[data.hosts_name[of]];
        parts.get('host').push({ start, length, row, text, colour });
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
          if (isKnown && data.bars_family[of] === this.calls) {
            for (const { isHidden, ...part } of this.partsOfCall(start, length, bar)) {
              parts.get(isHidden ? 'hidden' : family).push({ ...part, text: part.isLongest ? text : '', ...shape });
            }
          } else parts.get(family).push({ start, length, text, ...shape });
        }
      }
    });
    return [...this.figure.data.map((trace) => this.trace(trace, parts.get(trace.meta))), ...this.marks()];
  }

  // What is drawn over the bars: the critical path, what was found, what is pinned.
  marks() {
    const { data } = this;
    const line = (colour, width) => ({ color: 'rgba(0, 0, 0, 0)', line: { color: colourOf(colour), width } });
    const layers = [
      [
        this.onPath ? [...data.bar_path.keys()].filter((bar) => data.bar_path[bar]) : [],
        { color: colourOf('me') },
        PATH,
      ],
      [this.found, line('ink', 1.5), TALL],
      [this.bar < 0 ? [] : [this.bar], line('accent', 3), TALL],
    ];
    return layers
      .filter(([bars]) => bars.length)
      .map(([bars, marker, width]) => {
        const drawn = [];
        for (let lane = 0; lane < this.lanes.length; lane += 1) {
          const own = bars.filter((bar) => data.bar_stream[bar] === lane);
          const row = this.firstLane + lane + (width === PATH ? (TALL - PATH) / 2 : 0);
          const seen = barsInView(data.bar_start, data.bar_length, own, this.ticks, this.perPixel * 1.5);
          for (const [start, length] of seen) drawn.push({ start, length, row, width, text: '' });
        }
        return this.trace({ type: 'bar', orientation: 'h', showlegend: false, marker }, drawn);
      });
  }

  // What of a collective is in view, in parts: something computes in those that are hidden. A narrow one may share its
  // pixel with kernels that do not run at the same time, so it is one part, as most of it is.
  partsOfCall(start, length, bar) {
    const { bar_hidden: hidden, bar_length: lengths } = this.data;
    if (length < 2 * this.perPixel)
      return [{ start, length, isHidden: hidden[bar] > lengths[bar] / 2, isLongest: true }];
    const [from, to] = this.ticks;
    const seen = [Math.max(start, from), Math.min(start + length, to)];
    const parts = partsOf(this.cover, seen, this.perPixel);
    const longest = parts.reduce((most, part) => (part[1] > most[1] ? part : most));
    return parts.map((part) => ({ start: part[0], length: part[1], isHidden: part[2], isLongest: part === longest }));
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
      margin: { l: isNarrow ? 8 : this.margin, r: 10, t: 4, b: 28 },
      height: layout.height - 78,
      xaxis: {
        ...layout.xaxis,
        title: { text: '' },
        nticks: Math.max(3, Math.floor(this.width / 130)),
        zeroline: false,
      },
      yaxis: { ...layout.yaxis, showticklabels: !isNarrow, ticks: '', ticktext: this.titles() },
    };
  }

  titles() {
    const most = Math.floor((this.margin - 14) / PER_LETTER);
    const { tickvals, ticktext } = this.figure.layout.yaxis;
    return ticktext.map((text, at) => {
      const lane = tickvals[at] - this.firstLane;
      return lane < 0 ? text : plain(cut(this.data.meta.streams[lane], most));
    });
  }

  // ---- finding, pinning and summing

  wire() {
    super.wire();
    if (!this.pinned) return; // of a comparison
    const toggle = $('.on-path', this.root);
    toggle.hidden = !this.data.meta.has_path;
    const onKernels = this.us(this.data.bar_path.reduce((sum, ticks) => sum + ticks, 0)) / this.whole[1];
    const others = Math.round(100 * (1 - onKernels));
    if (others > 0) toggle.append(` (${others}% of it on the host or idle, not drawn)`);
    $('input', toggle).addEventListener('change', ({ target }) => {
      this.onPath = target.checked;
      this.refresh();
    });
    this.seek.addEventListener('input', () => this.find(barsWith(this.data, this.seek.value)));
    this.seek.addEventListener('keydown', (event) => {
      if (event.key === 'Enter') this.next(event.shiftKey ? -1 : 1);
      else if (event.key === 'Escape') this.release();
      else return;
      event.preventDefault();
    });
    this.wireDrag();
  }

  acts() {
    return { ...super.acts(), sum: () => this.sumOfView() };
  }

  keys() {
    const own = { s: () => this.sumOfView(), Enter: (event) => this.next(event.shiftKey ? -1 : 1) };
    const all = super.keys();
    if (!this.pinned) return all;
    return { ...all, ...own, Escape: () => this.release() || all.Escape() };
  }

  find(bars) {
    this.found = bars;
    this.current = -1;
    this.say();
    this.refresh();
  }

  say() {
    const num = countText(this.found.length);
    const text = this.current < 0 ? num : `${countText(this.current + 1)} of ${num}`;
    this.told.textContent = this.found.length || this.seek.value ? text : '';
  }

  next(by) {
    const num = this.found.length;
    if (!num) return;
    this.current = this.current < 0 && by < 0 ? num - 1 : (this.current + by + num) % num;
    this.say();
    const bar = this.found[this.current];
    const start = this.us(this.data.bar_start[bar]);
    const length = this.us(this.data.bar_length[bar]);
    const [from, to] = this.view;
    const isSeen = start >= from && start + length <= to && (length * this.width) / (to - from) > 2 * NEAR;
    if (!isSeen) this.setView(start - 10 * Math.max(length, this.least), start + 11 * Math.max(length, this.least));
    this.pin(bar);
  }

  pin(bar) {
    this.bar = bar;
    const lane = this.data.bar_stream[bar];
    const content = this.aboutBar(lane, this.data.bar_start[bar], bar);
    this.keep(...content, make('p', {}, `lane: ${this.data.meta.streams[lane]}`));
  }

  keep(...content) {
    const close = make('button', { type: 'button', class: 'quiet', onclick: () => this.release() }, 'let go (Escape)');
    this.pinned.replaceChildren(...content.filter(Boolean), close);
    this.pinned.hidden = false;
    this.refresh();
  }

  // Unpin, and forget what was found; false if there was nothing.
  release() {
    if (this.pinned.hidden && !this.found.length) return false;
    this.bar = -1;
    this.pinned.hidden = true;
    this.seek.value = '';
    this.find([]);
    return true;
  }

  click(spot, event) {
    if (!this.pinned || event.shiftKey) return; // Shift chose a part to sum
    const lane = Math.round(spot.y) - this.firstLane;
    const { bar_start: start, bar_length: length } = this.data;
    const tick = this.tickAt(spot.x);
    const bar = lane < 0 ? -1 : nearest(start, length, this.lanes[lane] || [], tick, NEAR * this.perPixel);
    if (bar >= 0) this.pin(bar);
  }

  tickAt(x) {
    return this.at(x) / this.data.meta.tick_us;
  }

  sumOfView() {
    const lanes = new Set(this.lanes.keys());
    this.showSum('in view', barsBetween(this.data, lanes, this.ticks), this.ticks);
  }

  showSum(title, bars, range) {
    const { data } = this;
    const sum = sumOf(data, bars, range);
    const line = ([name, { num, ticks }]) => [
      make('dt', {}, `${usText(this.us(ticks))} in ${countText(num)}`),
      make('dd', {}, name),
    ];
    const list = (by, rows) => {
      const more = rows.length > MOST_NAMES ? `and ${countText(rows.length - MOST_NAMES)} more` : null;
      const head = make('p', { class: 'muted' }, by);
      return [head, make('dl', {}, ...rows.slice(0, MOST_NAMES).flatMap(line)), more ? make('p', {}, more) : null];
    };
    const remarks = [
      sum.unknown ? `${countText(sum.unknown)} of unknown duration` : '',
      sum.isCut ? 'of a kernel that the selection cuts, its part inside' : '',
      data.meta.has_path ? `${usText(this.us(sum.path))} on the critical path` : '',
      data.meta.merged ? 'neighbours are merged into bars: sums by kernel or row are of the longest of each' : '',
    ];
    this.bar = -1;
    this.keep(
      make(
        'p',
        { class: 'head' },
        make('b', {}, `${usText(this.us(sum.ticks))} in ${countText(sum.num)} kernels`),
        `, ${title}`,
      ),
      make('p', {}, remarks.filter(Boolean).join('; ')),
      ...list('by lane', sum.lanes),
      ...list('by kernel', sum.names),
    );
  }

  // From a row of a table: its bars are marked, in view and summed.
  showRow(title, row) {
    const bars = barsOf(this.data, row);
    this.seek.value = '';
    this.find(bars);
    if (bars.length) {
      const first = this.data.bar_start[bars[0]];
      const last = bars.reduce((end, bar) => Math.max(end, this.data.bar_start[bar] + this.data.bar_length[bar]), 0);
      const room = Math.max(0.02 * (last - first), 1);
      this.setView(this.us(first - room), this.us(last + room));
    }
    this.showSum(title, bars);
    this.root.scrollIntoView();
    this.holder.focus({ preventScroll: true });
  }

  // A drag with Shift sums what it covers. Plotly's own drag, which zooms, does not see it.
  wireDrag() {
    const { holder } = this;
    holder.addEventListener(
      'mousedown',
      (event) => {
        const from = event.shiftKey && event.button === 0 ? this.spot(event) : null;
        if (!from) return;
        event.preventDefault();
        event.stopPropagation();
        const box = holder.parentNode.appendChild(make('div', { class: 'life chosen' }));
        const move = (next) => this.drawBox(box, event, next);
        const end = (last) => {
          box.remove();
          removeEventListener('mousemove', move);
          removeEventListener('mouseup', end);
          const to = this.spot(last);
          if (to && Math.abs(last.clientX - event.clientX) > NEAR) this.sumBetween(from, to);
        };
        addEventListener('mousemove', move);
        addEventListener('mouseup', end);
      },
      { capture: true },
    );
  }

  drawBox(box, first, last) {
    const frame = this.holder.getBoundingClientRect();
    const [left, right] = [first.clientX, last.clientX].sort((a, b) => a - b);
    const [top, bottom] = [first.clientY, last.clientY].sort((a, b) => a - b);
    Object.assign(box.style, {
      left: `${left - frame.left}px`,
      top: `${top - frame.top}px`,
      width: `${right - left}px`,
      height: `${bottom - top}px`,
    });
  }

  sumBetween(from, to) {
    const [first, last] = [from.y, to.y].sort((a, b) => a - b).map((y) => Math.round(y) - this.firstLane);
    const range = [from.x, to.x].sort((a, b) => a - b).map((x) => this.tickAt(x));
    const lanes = new Set([...this.lanes.keys()].filter((lane) => first <= lane && lane <= last));
    const title = range.map((tick) => usText(this.us(tick))).join(' to ');
    this.showSum(title, barsBetween(this.data, lanes, range), range);
  }

  // ---- what is pointed at

  point(spot, event) {
    const row = Math.round(spot.y);
    const tick = this.tickAt(spot.x);
    const content = this.about(row, tick);
    if (content) note.show(event.clientX, event.clientY, ...content);
    else note.hide();
  }

  about(row, tick) {
    if (row >= this.firstLane) return this.aboutBar(row - this.firstLane, tick);
    if (row >= this.firstHost) return this.aboutHost(row - this.firstHost, tick);
    return row < this.firstRange ? this.aboutLayer(row, tick) : this.aboutRange(row - this.firstRange, tick);
  }

  aboutHost(lane, tick) {
    const { data } = this;
    const { meta } = data;
    const bar = nearest(data.host_start, data.host_length, this.host[lane], tick, NEAR * this.perPixel);
    if (bar < 0) return null;
    const of = data.host_of[bar];
    const name = meta.host_names[data.hosts_name[of]];
    const num = data.host_num[bar];
    const long = usText(this.us(data.host_length[bar]));
    return [
      make('p', { class: 'head' }, make('b', {}, num > 1 ? `${countText(num)} operations` : name), `, ${long}`),
      num > 1 ? make('p', {}, `the longest: ${name}`) : null,
      make(
        'p',
        {},
        `${meta.threads[lane]}, ${meta.kinds[data.hosts_kind[of]]}, at ${usText(this.us(data.host_start[bar]))}`,
      ),
      make('p', {}, meta.layers[data.hosts_layer[of]] || '(outside of modules)'),
    ].filter(Boolean);
  }

  aboutRange(lane, tick) {
    const { data } = this;
    const range = nearest(data.range_start, data.range_length, this.ranges[lane] || [], tick, 0);
    if (range < 0) return null;
    const num = data.range_calls[range];
    const calls = num ? `, ${countText(num)} collective call${num === 1 ? '' : 's'}` : '';
    const busy = usText(this.us(data.range_busy[range]));
    return [
      make(
        'p',
        { class: 'head' },
        make('b', {}, data.meta.ranges[data.range_name[range]]),
        `, ${usText(this.us(data.range_length[range]))} on the GPU`,
      ),
      make('p', {}, `${countText(data.range_kernels[range])} kernels of ${busy}${calls}`),
    ];
  }

  aboutBar(lane, tick, pinned = -1) {
    const { data } = this;
    const { meta } = data;
    const bar =
      pinned < 0
        ? nearest(data.bar_start, data.bar_length, this.lanes[lane] || [], tick, NEAR * this.perPixel)
        : pinned;
    if (bar < 0) return null;
    const of = data.bar_kind[bar];
    const num = data.bar_num[bar];
    const name = meta.kernels[data.bars_name[of]];
    const long = data.bars_known[of] ? usText(this.us(data.bar_length[bar])) : 'duration not known';
    const what = [meta.families[data.bars_family[of]], meta.kinds[data.bars_kind[of]]].join(', ');
    return [
      make('p', { class: 'head' }, make('b', {}, num > 1 ? `${countText(num)} kernels` : name), `, ${long}`),
      num > 1 ? make('p', {}, `the longest: ${name}`) : null,
      data.bars_family[of] === this.calls && data.bars_known[of] ? make('p', {}, this.exposure(bar)) : null,
      make('p', {}, `${what}, at ${usText(this.us(data.bar_start[bar]))}`),
      make('p', {}, meta.layers[data.bars_layer[of]] || '(outside of modules)'),
      data.bar_path[bar] ? make('p', {}, `${usText(this.us(data.bar_path[bar]))} on the critical path`) : null,
    ].filter(Boolean);
  }

  exposure(bar) {
    const { bar_hidden: hidden, bar_length: length } = this.data;
    return `hidden ${usText(this.us(hidden[bar]))}, exposed ${usText(this.us(Math.max(length[bar] - hidden[bar], 0)))}`;
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

// The rows of tables that have lanes get a button that leads there: "data-lanes" says what a table's rows are.
export function wireRows(chart) {
  for (const table of $$('table[data-lanes]')) {
    for (const row of $$('tbody tr', table)) {
      const { fold, kernel } = row.dataset;
      const cells = [...row.cells].slice(0, 2).map((cell) => cell.textContent.trim());
      const means = {
        call: () => ({ call: cells.join(' ') }),
        kernel: () => ({ row: Number(kernel) }),
        layer: () => ({ layers: layersOf(chart.data, Number(fold)) }),
      }[table.dataset.lanes];
      const title = table.dataset.lanes === 'call' ? cells.join(' ') : $('.label', row)?.textContent || cells[0];
      const show = () => {
        chart.draw();
        chart.showRow(title, means());
      };
      const label = `find ${cut(title, 80)} in the lanes`;
      row.lastElementChild.append(
        make('button', { type: 'button', class: 'lanes', title: label, 'aria-label': label, onclick: show }),
      );
    }
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
