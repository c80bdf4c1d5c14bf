// Collective calls over the run, one lane for each group and operation. It shows the view of the memory timeline.

import { make, note } from './dom.js';
import { tallestInView } from './sampling.js';
import { bytesText, countText } from './text.js';
import { ZoomChart } from './zoom.js';

const NEAR = 6; // pixels

export class CallChart extends ZoomChart {
  constructor(root, data, memory) {
    super(root, data.meta.figures.calls, data.meta.style, { whole: memory.whole, least: memory.least });
    this.data = data;
    this.memory = memory;
    this.view = [...memory.view];
    this.lanes = data.meta.lanes.map(() => []);
    for (let call = 0; call < data.call_move.length; call += 1) this.lanes[data.call_lane[call]].push(call);
    this.most = data.call_bytes.reduce((most, bytes) => Math.max(most, bytes), 1);
  }

  place(move) {
    return this.memory.place(move);
  }

  at(place) {
    return this.memory.at(place);
  }

  show(view) {
    this.whole = this.memory.whole;
    super.show(view);
  }

  traces() {
    const { data, lanes } = this;
    const pixel = (this.view[1] - this.view[0]) / Math.max(this.width - 90, 1);
    return this.figure.data.map((trace) => {
      const calls = tallestInView(data.call_move, data.call_bytes, lanes[trace.meta], this.view, pixel);
      const floor = lanes.length - 1 - trace.meta;
      const place = (call) => this.place(data.call_move[call]);
      return {
        ...trace,
        x: calls.flatMap((call) => [place(call), place(call), null]),
        y: calls.flatMap((call) => [floor, floor + this.tall(data.call_bytes[call]), null]),
        line: { ...trace.line, width: 1.2, simplify: false },
        text: undefined,
        hoverinfo: 'none',
        hovertemplate: undefined,
      };
    });
  }

  // The cube root keeps calls of 16 KiB and of 1 GiB both visible.
  tall(bytes) {
    return 0.06 + 0.58 * Math.cbrt(bytes / this.most);
  }

  layout() {
    const layout = super.layout();
    return {
      ...layout,
      hovermode: false,
      height: layout.height - 40,
      margin: { l: 74, r: 10, t: 4, b: 26 },
      xaxis: {
        ...layout.xaxis,
        title: { text: '' },
        ticksuffix: this.memory.axis.suffix,
        exponentformat: 'none',
        separatethousands: true,
        nticks: Math.max(3, Math.floor(this.width / 130)),
        showgrid: false,
        zeroline: false,
      },
      yaxis: { ...layout.yaxis, zeroline: false },
    };
  }

  point(spot, event) {
    const lane = this.lanes.length - 1 - Math.floor(spot.y);
    const near = NEAR * spot.perPixel;
    let best = -1;
    let away = near;
    for (const call of this.lanes[lane] || []) {
      const distance = Math.abs(this.place(this.data.call_move[call]) - spot.x);
      if (distance > away) continue;
      best = call;
      away = distance;
    }
    if (best < 0) {
      note.hide();
      return;
    }
    const { group, operation } = this.data.meta.lanes[lane];
    const move = this.data.call_move[best];
    const span = this.memory.timeline.span(move);
    const when = span ? ` · step ${span.step}, ${span.phase}` : '';
    note.show(
      event.clientX,
      event.clientY,
      make('p', { class: 'head' }, make('b', {}, operation), ` on ${group}`),
      make('p', {}, `${bytesText(this.data.call_bytes[best])}${when}, before event ${countText(move)}`),
    );
  }
}
