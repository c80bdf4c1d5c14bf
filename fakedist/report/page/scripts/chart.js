// What every chart shares: plotly's settings, the page's colours, and drawing again when its width or they change.

import { $, colourOf } from './dom.js';

const SETTINGS = { displayModeBar: false, doubleClick: false, showTips: false, scrollZoom: false };
const AHEAD = 500; // pixels
// Data, in which no colour is looked for.
const DATA = new Set(['x', 'y', 'base', 'ids', 'parents', 'values', 'labels', 'text', 'hovertext', 'customdata']);

// A figure's part with the style sheet's colours, which differ where the page is dark.
export function themed(part, styleNames, lookUp = colourOf) {
  if (typeof part === 'string') return styleNames[part] ? lookUp(styleNames[part]) : part;
  if (!part || typeof part !== 'object' || ArrayBuffer.isView(part)) return part;
  if (Array.isArray(part)) return part.map((each) => themed(each, styleNames, lookUp));
  const found = {};
  for (const [name, each] of Object.entries(part)) {
    found[name] = DATA.has(name) ? each : themed(each, styleNames, lookUp);
  }
  return found;
}

export class Chart {
  constructor(root, figure, styleNames) {
    this.root = root;
    this.holder = $('.chart', root);
    this.figure = figure;
    this.styleNames = styleNames;
    this.pending = 0;
    this.width = 0;
  }

  // What to draw now. Charts that zoom have their own.
  traces() {
    return this.figure.data;
  }

  layout() {
    return this.figure.layout;
  }

  // Take as much room as when it is drawn, so that nothing moves then.
  reserve() {
    this.width = this.holder.clientWidth;
    this.holder.style.minHeight = `${this.layout().height}px`;
  }

  // Draw for the first time, and again whenever the width changes.
  draw() {
    this.drawing ||= this.begin();
    return this.drawing;
  }

  async begin() {
    await this.paint();
    this.holder.style.minHeight = '';
    this.wire();
    new ResizeObserver(() => {
      if (this.holder.clientWidth !== this.width) this.refresh();
    }).observe(this.holder);
  }

  wire() {}

  refresh() {
    if (!this.drawing) return;
    this.pending ||= requestAnimationFrame(() => {
      this.pending = 0;
      this.paint();
    });
  }

  paint(width = this.holder.clientWidth) {
    if (width < 80) return null;
    this.width = width;
    const traces = themed(this.traces(), this.styleNames); // before the layout, which may depend on what they show
    const layout = this.dressed(themed(this.layout(), this.styleNames));
    return globalThis.Plotly.react(this.holder, traces, layout, SETTINGS);
  }

  // The page's fonts and colours around a layout.
  dressed(layout) {
    const [ink, muted, line] = ['ink', 'muted', 'line'].map((name) => colourOf(name));
    const clear = 'rgba(0, 0, 0, 0)';
    const axis = (own) => ({
      gridcolor: line,
      zerolinecolor: line,
      linecolor: line,
      tickfont: { color: muted, size: 12 },
      ...own,
      title: { ...own?.title, font: { color: muted, size: 12 } },
    });
    return {
      ...layout,
      width: this.width,
      autosize: false,
      title: undefined,
      paper_bgcolor: clear,
      plot_bgcolor: clear,
      font: { family: colourOf('font'), size: 13, color: ink },
      hoverlabel: {
        align: 'left',
        namelength: -1,
        bgcolor: colourOf('panel'),
        bordercolor: line,
        font: { color: ink, size: 13 },
      },
      xaxis: axis(layout.xaxis),
      yaxis: axis(layout.yaxis),
    };
  }
}

// Draw the charts in view, and each of the others shortly before it comes into view, so that they do not delay opening.
export async function drawWhenSeen(charts) {
  const of = new Map(charts.map((chart) => [chart.holder, chart]));
  const watch = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        if (!isIntersecting) continue;
        watch.unobserve(target);
        of.get(target).draw();
      }
    },
    { rootMargin: `${AHEAD}px 0px` },
  );
  for (const chart of charts) chart.reserve();
  for (const chart of charts) {
    const { top, bottom } = chart.holder.getBoundingClientRect();
    if (top < innerHeight && bottom > 0) await chart.draw();
    else watch.observe(chart.holder);
  }
}

// Draw charts again, in other colours or at another width: on paper also those that were not in view yet.
export function redrawn(charts) {
  return (width) => {
    for (const chart of charts) if (width || chart.drawing) chart.paint(width);
  };
}
