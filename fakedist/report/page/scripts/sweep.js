// The page of a sweep: charts whose points open their reports, and tables that filter.

import { Chart } from './chart.js';
import { $ } from './dom.js';
import { openPage } from './opening.js';

const NARROW = 640; // pixels

// The reports of a sweep lie below its page: an address from elsewhere is not followed.
const isReport = (path) => /^(?:runs\/[0-9a-f]+\/)?rank\d+\/report\.html$/.test(path);

class PointChart extends Chart {
  // On a phone the legend takes a line of its own, above the points.
  layout() {
    const layout = super.layout();
    if (this.width >= NARROW) return layout;
    const legend = { ...layout.legend, orientation: 'h', x: 0, y: 1, yanchor: 'bottom' };
    return { ...layout, legend, margin: { ...layout.margin, t: 60, r: 10 } };
  }

  wire() {
    this.holder.on('plotly_click', ({ points }) => {
      const path = String(points[0].customdata ?? '');
      if (isReport(path)) location.assign(path);
    });
  }
}

class MapChart extends PointChart {
  constructor(root, maps, styleNames) {
    super(root, Object.values(maps)[0], styleNames);
    const choice = $('select', root);
    choice.addEventListener('change', () => {
      this.figure = maps[choice.value];
      this.refresh();
    });
  }
}

function chartsOf({ figures, maps = {}, style }) {
  return {
    front: figures.front ? new PointChart($('#front'), figures.front, style) : null,
    parallel: figures.parallel ? new PointChart($('#parallel'), figures.parallel, style) : null,
    map: Object.keys(maps).length ? new MapChart($('#map'), maps, style) : null,
  };
}

openPage((data) => ({ charts: chartsOf(data.meta) }));
