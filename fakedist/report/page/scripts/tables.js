// Tables that sort, filter and unfold. Their contents are already in the document; the page works without this script.

import { addFoot } from './copying.js';
import { $, $$, make } from './dom.js';
import { countText, orDash, usText } from './text.js';
import { ownerOf } from './timeline.js';

export function wireTable(table, data) {
  const body = table.tBodies[0];
  const groups = []; // a row, and those below it that it unfolds to
  for (const row of body.rows) {
    if (row.classList.contains('under')) groups[groups.length - 1].push(row);
    else groups.push(Object.assign([row], { at: groups.length }));
  }
  $$('th[data-sort]', table).forEach((heading) => {
    const column = heading.cellIndex;
    const button = make('button', { type: 'button', class: 'sort', title: 'sort' }, ...heading.childNodes);
    heading.replaceChildren(button);
    button.addEventListener('click', () => sortTable(table, groups, heading, column));
  });
  wireFilter(table, groups);
  for (const opener of $$('button.open', body)) opener.addEventListener('click', () => toggle(opener, groups, data));
  // A row with a stack unfolds wherever it is clicked, unless that selects its text.
  body.addEventListener('click', ({ target }) => {
    const row = target.closest('button, a') ? null : target.closest('tr');
    const isFolded = row?.nextElementSibling?.classList.contains('under');
    const opener = isFolded && ($('button.open.stack', row) || $('button.open', row));
    if (opener && getSelection().isCollapsed) toggle(opener, groups, data);
  });
}

// Every table that scrolls stands in a frame, which shows at which sides it goes on.
export function wireScrolls() {
  const frames = new Map();
  const watch = new ResizeObserver((entries) => {
    for (const { target } of entries) showCuts(frames.get(target));
  });
  for (const scroll of $$('.scroll')) {
    const frame = make('div', { class: 'frame' });
    scroll.replaceWith(frame);
    frame.append(scroll);
    const parts = { frame, scroll, further: addFoot(scroll) };
    for (const node of [scroll, scroll.firstElementChild]) {
      frames.set(node, parts);
      watch.observe(node);
    }
    scroll.addEventListener('scroll', () => showCuts(parts), { passive: true });
  }
}

// Tables that scroll take the keyboard's focus; others are not tab stops.
function showCuts({ frame, scroll, further }) {
  const right = scroll.scrollLeft + scroll.clientWidth;
  frame.classList.toggle('cut-left', scroll.scrollLeft > 1);
  frame.classList.toggle('cut-right', right < scroll.scrollWidth - 1);
  frame.classList.toggle('cut-below', scroll.scrollTop + scroll.clientHeight < scroll.scrollHeight - 1);
  const beyond = $$('thead th', scroll).filter(
    (heading) => heading.offsetLeft + heading.offsetWidth > right + 1,
  ).length;
  further.hidden = beyond === 0;
  further.textContent = `${beyond} more column${beyond === 1 ? '' : 's'} →`;
  if (scroll.scrollWidth <= scroll.clientWidth && scroll.scrollHeight <= scroll.clientHeight) {
    scroll.removeAttribute('tabindex');
    return;
  }
  const heading = $('h2, h3', scroll.closest('.panel') || document);
  scroll.tabIndex = 0;
  scroll.setAttribute('role', 'group');
  if (heading) scroll.setAttribute('aria-label', heading.firstChild.textContent.trim());
}

function sortTable(table, groups, heading, column) {
  const isText = heading.dataset.sort === 'text',
    before = heading.getAttribute('aria-sort');
  const order = {
    null: isText ? 'ascending' : 'descending',
    ascending: isText ? 'descending' : null,
    descending: isText ? null : 'ascending',
  }[before];
  for (const other of $$('th[aria-sort]', table)) other.removeAttribute('aria-sort');
  if (order) heading.setAttribute('aria-sort', order);
  const value = (group) => {
    const cell = group[0].cells[column];
    return isText ? cell.textContent.trim() : Number(cell.dataset.value);
  };
  const sign = order === 'descending' ? -1 : 1;
  groups.sort((a, b) => {
    if (!order) return a.at - b.at;
    const [one, other] = [value(a), value(b)];
    return (isText ? one.localeCompare(other, 'en', { numeric: true }) : one - other) * sign || a.at - b.at;
  });
  table.tBodies[0].append(...groups.flat());
}

function wireFilter(table, groups) {
  const panel = table.closest('.tabled'),
    box = $('input[type=search]', panel),
    small = $('input.small', panel);
  const told = $('.told', panel);
  const apply = () => {
    const wanted = box ? box.value.trim().toLowerCase() : '';
    let shown = 0;
    for (const group of groups) {
      const tooSmall = small && !small.checked && group[0].dataset.small !== undefined && !wanted;
      const hidden = tooSmall || (wanted && !group[0].textContent.toLowerCase().includes(wanted));
      group.forEach((row) => {
        row.hidden = hidden || (row.classList.contains('under') && row.dataset.open !== 'yes');
      });
      shown += !hidden;
    }
    if (told) told.textContent = wanted ? `${countText(shown)} of ${countText(groups.length)} rows` : '';
  };
  if (box) box.addEventListener('input', apply);
  if (small) small.addEventListener('change', apply);
  apply();
}

function toggle(opener, groups, data) {
  const row = opener.closest('tr'),
    group = groups.find((each) => each[0] === row);
  const open = opener.getAttribute('aria-expanded') !== 'true';
  opener.setAttribute('aria-expanded', open);
  const isMade = !opener.classList.contains('stack') && (row.dataset.fold ?? row.dataset.blocks) !== undefined;
  if (isMade) {
    for (const each of group.filter(({ isMade }) => isMade)) each.remove();
    const kept = group.filter((each) => !each.isMade);
    const made = open ? (row.dataset.blocks ? equalBlocks(row, data) : repeats(row, data)) : [];
    for (const each of made) each.isMade = true;
    group.splice(0, group.length, ...kept, ...made);
    kept[kept.length - 1].after(...made);
  } else {
    for (const under of group.slice(1)) {
      if (under.isMade) continue;
      under.hidden = !open;
      under.dataset.open = open ? 'yes' : '';
    }
  }
}

// The single blocks that a row stands for: the layer and the way to each.
function equalBlocks(row, data) {
  const cells = [...row.cells].map((cell) => cell.className);
  const at = $('.label', row).parentElement.cellIndex;
  return row.dataset.blocks.split(' ').map((number) => {
    const line = make('tr', { class: 'repeat' }, ...cells.map((name) => make('td', { class: name })));
    line.cells[at].textContent = ownerOf(data, Number(number));
    line.cells[cells.length - 1].append(
      make('button', { type: 'button', class: 'find', 'data-block': number }, 'show'),
    );
    return line;
  });
}

// The single layers that a folded row stands for, with their children, in the columns of the table.
function repeats(row, data) {
  const fold = Number(row.dataset.fold);
  let at = 0;
  for (let i = 0; i < fold; i += 1) at += data.fold_size[i];
  const table = row.closest('table'),
    columns = $$('thead th', table).map((heading) => heading.dataset);
  const found = [];
  for (const layer of data.fold_layers.subarray(at, at + data.fold_size[fold])) {
    const line = make('tr', { class: 'repeat' });
    for (const { sum, own, most, time, blank } of columns) {
      if (blank) {
        line.append(make('td'));
        continue;
      }
      if (time) {
        const us = data[`time_${time}`][layer] / 1e3;
        line.append(make('td', { 'data-value': us }, us ? usText(us) : '-'));
        continue;
      }
      const values = sum
        ? sum.split(' ').map((name) => layerTotals(data)[name])
        : own
          ? data.meta.categories.map((name) => data[`layer_${name}`])
          : most
            ? [data.layer_most]
            : null;
      if (!values) {
        line.append(make('th', { scope: 'row' }, data.meta.layers[layer]));
        continue;
      }
      const bytes = values.reduce((total, of) => total + of[layer], 0);
      line.append(make('td', { 'data-value': bytes }, orDash(bytes)));
    }
    found.push(line);
  }
  return found;
}

// Bytes by category with children, of every layer; children come after their parents.
function layerTotals(data) {
  if (data.totals) return data.totals;
  data.totals = {};
  for (const name of data.meta.categories) {
    const total = Float64Array.from(data[`layer_${name}`]);
    for (let at = total.length - 1; at > 0; at -= 1) {
      const above = data.layer_parent[at];
      if (above > 1) total[above - 1] += total[at];
    }
    data.totals[name] = total;
  }
  return data.totals;
}
