// Take things out of the page: a text to the clipboard, a table as a CSV file. Both work offline, from a file.

import { $, $$, make } from './dom.js';

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // refused, or not there: not every browser trusts a page from a file
    const box = make('textarea', { class: 'skip', 'aria-hidden': 'true' });
    box.value = text;
    document.body.append(box);
    box.select();
    document.execCommand('copy');
    box.remove();
  }
}

export function wireCopies() {
  for (const button of $$('button.copy')) {
    const before = button.textContent;
    button.addEventListener('click', async () => {
      await copyText($(button.dataset.of).textContent.trim());
      button.textContent = 'copied';
      setTimeout(() => {
        button.textContent = before;
      }, 1500);
    });
  }
}

const csvCell = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

// All rows of a table, also those that a filter hides. Amounts are plain numbers, in the unit of their column.
export function csvText(headings, rows) {
  return [headings, ...rows].map((row) => `${row.map(csvCell).join(',')}\r\n`).join('');
}

function tableCsv(table) {
  const columns = $$('thead th', table).filter((heading) => !heading.classList.contains('more'));
  const headings = columns.map((heading) => {
    const { unit } = heading.dataset,
      name = heading.textContent.trim();
    return unit ? `${name} (${unit})` : name;
  });
  const rows = $$('tbody tr', table).filter((row) => !row.classList.contains('under'));
  return csvText(
    headings,
    rows.map((row) => columns.map((heading) => cellText(row.cells[heading.cellIndex]))),
  );
}

function cellText(cell) {
  return cell.dataset.value ?? ($('.label', cell) || cell).textContent.trim();
}

function saveFile(name, content, type) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const link = make('a', { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

// The line below a table: what is cut off at its right, and the table as a file.
export function addFoot(scroll) {
  const table = $('table', scroll);
  const further = make('button', {
    type: 'button',
    class: 'further quiet',
    hidden: '',
    onclick: () => scroll.scrollBy({ left: scroll.clientWidth * 0.7, behavior: 'smooth' }),
  });
  const csv = table.classList.contains('live')
    ? make(
        'button',
        {
          type: 'button',
          class: 'csv quiet',
          title: 'save this table as CSV',
          onclick: () => saveFile(`fakedist-${table.id}.csv`, tableCsv(table), 'text/csv'),
        },
        'CSV',
      )
    : null;
  const foot = make('div', { class: 'foot' }, further, make('span', { class: 'gap' }), csv);
  scroll.parentNode.after(foot);
  return further;
}
