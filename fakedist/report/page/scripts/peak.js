// The peak by layer, as nested areas (treemap) or as rows below each other (icicle).

import { Chart } from './chart.js';
import { $, $$, make } from './dom.js';

export class PeakChart extends Chart {
  constructor(root, data) {
    super(root, data.meta.figures.peak, data.meta.style);
    this.kind = 'treemap';
    this.level = 'peak';
    this.boxes = this.figure.data[0];
    for (const button of $$('[data-kind]', root)) {
      button.addEventListener('click', () => {
        this.kind = button.dataset.kind;
        for (const each of $$('[data-kind]', root)) each.setAttribute('aria-pressed', each === button);
        this.refresh();
      });
    }
  }

  traces() {
    const tiling = this.kind === 'icicle' ? { orientation: 'v' } : { pad: 2 };
    return [{ ...this.boxes, type: this.kind, level: this.level, tiling, leaf: { opacity: 1 } }];
  }

  layout() {
    const height = this.width < 560 ? 400 : 480;
    return { ...this.figure.layout, height, margin: { l: 0, r: 0, t: 0, b: 0 } };
  }

  wire() {
    for (const name of ['plotly_treemapclick', 'plotly_icicleclick']) {
      this.holder.on(name, ({ nextLevel }) => {
        this.level = nextLevel ?? 'peak';
        this.showPath();
      });
    }
    this.showPath();
  }

  open(level) {
    this.level = level;
    this.showPath();
    this.refresh();
  }

  // The way from the whole peak to what is shown, and the layers below it: how the keyboard moves through the picture.
  showPath() {
    const { ids, parents, customdata } = this.boxes;
    const row = ids.indexOf(this.level);
    const way = [];
    for (let at = row; at >= 0; at = ids.indexOf(parents[at])) way.unshift(at);
    const parts = way.map((at) =>
      at === row
        ? make('b', {}, `${textOf(customdata[at][0])}: ${customdata[at][1]}`)
        : make('button', { type: 'button', onclick: () => this.open(ids[at]) }, textOf(customdata[at][0])),
    );
    const hasBoxes = new Set(parents);
    const below = ids.filter((id, at) => parents[at] === this.level && hasBoxes.has(id));
    const option = (id) => {
      const [name, bytes] = customdata[ids.indexOf(id)];
      return make('option', { value: id }, `${textOf(name)} (${bytes})`);
    };
    const choice = make('select', { 'aria-label': 'open a layer below' }, make('option', { value: '' }, 'open…'));
    choice.append(...below.map(option));
    choice.addEventListener('change', () => choice.value && this.open(choice.value));
    const joined = parts.flatMap((part, at) => (at ? [' › ', part] : [part]));
    $('.path', this.root).replaceChildren(...joined, below.length ? choice : '');
  }
}

// A name that was escaped for plotly, as text.
const textOf = (shown) => shown.replaceAll('&lt;', '<').replaceAll('&gt;', '>').replaceAll('&amp;', '&');
