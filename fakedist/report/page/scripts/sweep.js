// The page of a sweep: charts whose points open their reports, and tables that filter.

import { Chart, drawWhenSeen, redrawn } from './chart.js';
import { wireCopies } from './copying.js';
import { $, $$ } from './dom.js';
import { wireNav } from './nav.js';
import { wireScrolls, wireTable } from './tables.js';
import { wirePrint, wireTheme } from './theme.js';
import { loadLibrary, unpack } from './unpack.js';

// The reports of a sweep lie below its page: an address from elsewhere is not followed.
export function isReport(path) {
  return /^runs\/[0-9a-f]+\/rank\d+\/report\.html$/.test(path);
}

class PointChart extends Chart {
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

function chartsOf({ figures, maps, style }) {
  return {
    front: figures.front ? new PointChart($('#front'), figures.front, style) : null,
    parallel: figures.parallel ? new PointChart($('#parallel'), figures.parallel, style) : null,
    map: Object.keys(maps).length ? new MapChart($('#map'), maps, style) : null,
  };
}

async function start() {
  wireNav();
  const [data] = await Promise.all([unpack($('#numbers')), loadLibrary($('#plotly'))]);
  const charts = chartsOf(data.meta);
  const drawn = Object.values(charts).filter(Boolean);
  for (const table of $$('table.live')) wireTable(table, data);
  wireScrolls();
  wireCopies();
  await drawWhenSeen(drawn);
  const redraw = redrawn(drawn);
  wireTheme(redraw);
  wirePrint(redraw);
  window.fakedist = { ...charts, data };
  document.documentElement.dataset.ready = 'yes';
}

start().catch((error) => {
  $('#trouble').hidden = false;
  $('#trouble').textContent =
    `The charts of this page need a browser from 2023 or later (${error.message}); all tables are below.`;
});
