// The live page: it asks the server for what there is so far, once a second, and gives way to the report at the end.

import { isReport } from './address.js';
import { $, make } from './dom.js';
import { bytesText, cut, usText } from './text.js';
import { wireTheme } from './theme.js';

const PAUSE_MS = 1_000;
const [WIDE, HIGH] = [1_000, 260];
const LONGEST = 60; // letters of a point's cell, which is one line; its title has all

function showRows(rows) {
  $('#rows').replaceChildren(...rows.flatMap(([name, text]) => [make('dt', {}, name), make('dd', {}, text)]));
}

function showMemory(points) {
  $('#memory').hidden = points.length < 2;
  if (points.length < 2) return;
  const [first, last] = [points[0][0], points[points.length - 1][0]];
  const most = points.reduce((sum, [, allocated, reserved]) => Math.max(sum, allocated, reserved), 1);
  const x = (at) => ((at - first) / (last - first || 1)) * WIDE;
  const y = (bytes) => HIGH - 4 - (bytes / most) * (HIGH - 8);
  // What holds until the next point: steps, not slopes.
  const line = (of) =>
    points.flatMap((point, at) => {
      const until = points[at + 1] || point;
      return [`${x(point[0])},${y(point[of])}`, `${x(until[0])},${y(point[of])}`];
    });
  $('#memory .allocated').setAttribute('points', [`0,${HIGH}`, ...line(1), `${WIDE},${HIGH}`].join(' '));
  $('#memory .reserved').setAttribute('points', line(2).join(' '));
  $('#scale').textContent = `0 to ${bytesText(most)}, over ${usText((last - first) * 1e6)}`;
}

// `links`: for each row the pages of its ranks, as text and address.
function showTable(id, names, rows, links, longest = Infinity) {
  const panel = $(id);
  panel.hidden = !rows?.length;
  if (panel.hidden) return;
  const row = (kind, cells) => make('tr', {}, ...cells.map((cell) => make(kind, { class: 'text' }, cell)));
  const pages = (own) =>
    make(
      'span',
      {},
      ...own.filter(([, path]) => isReport(path)).map(([text, path]) => make('a', { href: path }, text, ' ')),
    );
  $('thead', panel).replaceChildren(row('th', [...names, 'page']));
  const shown = (cell) => {
    const text = String(cell);
    return text.length > longest ? make('span', { title: text }, cut(text, longest)) : text;
  };
  $('tbody', panel).replaceChildren(...rows.map((cells, at) => row('td', [...cells.map(shown), pages(links[at])])));
}

function show(state) {
  $('#trouble').hidden = !state.trouble;
  $('#trouble').textContent = state.trouble || '';
  if (state.trouble) return;
  $('#title').textContent = state.title;
  showRows(state.rows);
  showMemory(state.points);
  if (state.heading) $('#points h2').textContent = state.heading;
  showTable('#points', state.columns, state.table, state.links, LONGEST);
  showTable('#others', ['point', 'status', 'why', 'line'], state.others, state.other_links);
}

async function follow() {
  try {
    const state = await (await fetch('state', { cache: 'no-store' })).json();
    if (state.done) {
      location.reload();
      return;
    }
    show(state);
    $('#status').textContent = 'This page asks every second.';
  } catch {
    $('#status').textContent = 'fakedist view has ended: this is what it showed last.';
  }
  document.documentElement.dataset.ready = 'yes';
  setTimeout(follow, PAUSE_MS);
}

wireTheme(() => {});
follow();
