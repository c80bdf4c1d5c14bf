// The list of keys, above the page.

import { $ } from './dom.js';

const isTyping = (node) => Boolean(node.closest?.('input:not([type=checkbox]), textarea, select'));

export function wireKeys() {
  const dialog = $('#keys');
  const toggle = () => (dialog.open ? dialog.close() : dialog.showModal());
  $('#help').addEventListener('click', toggle);
  // A browser closes it with Escape, and gives the focus back.
  dialog.addEventListener('click', ({ target }) => {
    if (target === dialog || target.closest('button')) dialog.close();
  });
  addEventListener('keydown', (event) => {
    if (event.key !== '?' || event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    event.preventDefault();
    toggle();
  });
}
