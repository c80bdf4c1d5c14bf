// The page of several ranks of a job: their step on one axis, and tables that sort.

import { drawWhenSeen, redrawn } from './chart.js';
import { wireCopies } from './copying.js';
import { $, $$ } from './dom.js';
import { wireNav } from './nav.js';
import { wireScrolls, wireTable } from './tables.js';
import { wirePrint, wireTheme } from './theme.js';
import { loadLibrary, unpack } from './unpack.js';
import { ZoomChart } from './zoom.js';

const NEAREST = 10_000; // of the step, in the narrowest view

class LaneChart extends ZoomChart {
  constructor(root, { figures, style, step_ms: step }) {
    super(root, figures.lanes, style, { whole: [0, step], least: step / NEAREST });
  }

  layout() {
    const layout = super.layout();
    return { ...layout, showlegend: false, yaxis: { ...layout.yaxis, fixedrange: true, automargin: true } };
  }
}

async function start() {
  wireNav();
  const [data] = await Promise.all([unpack($('#numbers')), loadLibrary($('#plotly'))]);
  const lanes = data.meta.figures.lanes ? new LaneChart($('#stages'), data.meta) : null;
  for (const table of $$('table.live')) wireTable(table, data);
  wireScrolls();
  wireCopies();
  const drawn = lanes ? [lanes] : [];
  await drawWhenSeen(drawn);
  const redraw = redrawn(drawn);
  wireTheme(redraw);
  wirePrint(redraw);
  window.fakedist = { lanes, data };
  document.documentElement.dataset.ready = 'yes';
}

start().catch((error) => {
  $('#trouble').hidden = false;
  $('#trouble').textContent =
    `The charts of this page need a browser from 2023 or later (${error.message}); all tables are below.`;
});
