// The page of a comparison: two curves on one axis, two steps on one axis, and tables that filter.

import { $, $$, colourOf, make, note } from './dom.js';
import { KernelChart } from './kernels.js';
import { openPage } from './opening.js';
import { bytesText } from './text.js';
import { unpack } from './unpack.js';
import { link, ZoomChart } from './zoom.js';

const LEAST_COLUMNS = 8;

class CurveChart extends ZoomChart {
  constructor(root, data) {
    const num = data.a_most.length;
    super(root, data.meta.figures.compared, data.meta.style, { whole: [0, 1], least: LEAST_COLUMNS / num });
    this.data = data;
    this.num = num;
    this.status = $('.status', root);
    const { pieces } = data.meta;
    const steps = [...new Set(pieces.map(({ step }) => step))].filter((step) => step);
    const views = steps.slice(0, 12).map((step) => {
      const own = pieces.filter((piece) => piece.step === step);
      return [`step ${step}`, own[0].from, own[own.length - 1].to];
    });
    $('.tools', root).prepend(...this.buttonsFor([['whole run', 0, 1], ...views]));
  }

  layout() {
    const layout = super.layout();
    const [from, to] = this.view;
    const perPixel = (to - from) / Math.max(this.width - 84, 1);
    const shapes = layout.shapes.map((shape) => named(shape, perPixel));
    return {
      ...layout,
      shapes,
      annotations: layout.annotations?.map((label) => ({ ...label, bgcolor: colourOf('panel') })),
      hovermode: false,
      showlegend: false,
      height: 400,
      margin: { l: 74, r: 10, t: 30, b: 14 },
    };
  }

  point({ x }, event) {
    this.read(x);
    note.show(event.clientX, event.clientY, make('div', {}, this.status.textContent));
  }

  keys() {
    const move = (by) => (event) =>
      this.read((this.last ?? this.view[0]) + (by * (this.view[1] - this.view[0])) / (event.shiftKey ? 20 : 200));
    return { ...super.keys(), ArrowLeft: move(-1), ArrowRight: move(1) };
  }

  read(share) {
    this.last = Math.min(Math.max(share, this.view[0]), this.view[1]);
    this.status.textContent = this.text(Math.min(Math.floor(this.last * this.num), this.num - 1));
  }

  text(at) {
    const share = (at + 0.5) / this.num;
    const piece = this.data.meta.pieces.find(({ from, to }) => from <= share && share <= to);
    const [a, b] = [this.data.a_most[at], this.data.b_most[at]];
    const step = piece?.step ? `step ${piece.step}` : 'before the first step';
    const where = piece && this.data.meta.has_steps ? `${step}${piece.phase ? `, ${piece.phase}` : ''}: ` : '';
    return `${where}A ${bytesText(a)}, B ${bytesText(b)}, ${b > a ? '+' : ''}${bytesText(b - a)}`;
  }
}

// A shape whose label is shown only if it has room.
function named(shape, perPixel) {
  const room = (shape.x1 - shape.x0) / perPixel;
  const text = shape.label?.text || '';
  return text.length * 6.4 + 8 < room ? shape : { ...shape, label: undefined };
}

// The steps of both runs: one axis, as long as the longer one, and one view.
async function stepCharts() {
  const charts = [];
  for (const [at, holder] of $$('.step-numbers').entries()) {
    charts.push(new KernelChart($$('.step-of')[at], await unpack(holder)));
  }
  const longest = Math.max(...charts.map((chart) => chart.whole[1]));
  for (const chart of charts) {
    chart.whole = [0, longest];
    chart.show(chart.whole);
  }
  link(charts);
  return charts;
}

openPage(async (data) => {
  const steps = await stepCharts();
  return {
    charts: { curves: new CurveChart($('#timeline'), data), steps },
    done: () => steps.length && steps[0].wireButtons($('#steps')),
  };
});
