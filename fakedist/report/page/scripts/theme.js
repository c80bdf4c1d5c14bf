// Dark or light colours, and printing.

import { $, $$ } from './dom.js';

// A4 and Letter less their margins and the panels'. A chart has the screen's width until it is drawn again.
const PAPER_WIDTH = 660;

export function wireTheme(redraw) {
  const button = $('#theme');
  const root = document.documentElement;
  const system = matchMedia('(prefers-color-scheme: dark)');
  const isDark = () => (root.dataset.theme || (system.matches ? 'dark' : 'light')) === 'dark';
  const show = () => button.setAttribute('aria-pressed', isDark());
  button.addEventListener('click', () => {
    root.dataset.theme = isDark() ? 'light' : 'dark';
    show();
    redraw();
  });
  system.addEventListener('change', () => {
    show();
    redraw();
  });
  show();
}

// Paper is white and narrow: print in light colours and at its width, with the details open and folded rows folded.
export function wirePrint(redraw) {
  const root = document.documentElement;
  let before;
  let closed = [];
  addEventListener('beforeprint', () => {
    closed = $$('details:not([open])');
    for (const each of closed) each.open = true;
    before = root.dataset.theme;
    root.dataset.theme = 'light';
    redraw(PAPER_WIDTH);
  });
  addEventListener('afterprint', () => {
    for (const each of closed) each.open = false;
    if (before) root.dataset.theme = before;
    else delete root.dataset.theme;
    redraw();
  });
}
