// What opening a page takes, whichever page: its numbers are unpacked, its tables and charts are put together, and its
// colours, keys and paper work.

import { drawWhenSeen, redrawn } from './chart.js';
import { wireCopies } from './copying.js';
import { $, $$ } from './dom.js';
import { wireKeys } from './help.js';
import { wireNav } from './nav.js';
import { wireScrolls, wireTable } from './tables.js';
import { wirePrint, wireTheme } from './theme.js';
import { loadLibrary, unpack } from './unpack.js';

async function open(build) {
  wireNav();
  const [data] = await Promise.all([unpack($('#numbers')), loadLibrary($('#plotly'))]);
  for (const table of $$('table.live')) wireTable(table, data);
  wireScrolls();
  wireCopies();
  // Charts by name, one or several of a name, or null; what else is to be seen of the page; what else it draws.
  const { charts = {}, others = {}, drawOthers = () => {}, done = () => {} } = await build(data);
  const drawn = Object.values(charts).flat().filter(Boolean);
  await drawWhenSeen(drawn);
  const paint = redrawn(drawn);
  const redraw = (width) => {
    paint(width);
    drawOthers();
  };
  drawOthers();
  addEventListener('resize', drawOthers);
  wireTheme(redraw);
  wirePrint(redraw);
  wireKeys();
  done();
  window.fakedist = { ...charts, ...others, data };
  document.documentElement.dataset.ready = 'yes';
}

export function openPage(build) {
  open(build).catch((error) => {
    $('#trouble').hidden = false;
    $('#trouble').textContent =
      `The charts of this page need a browser from 2023 or later (${error.message}); all tables are below.`;
  });
}
