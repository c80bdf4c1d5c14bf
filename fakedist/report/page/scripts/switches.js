// Advised changes as switches: the verdict, the bar and the timeline with those that are on.

import { $, $$, make } from './dom.js';
import { bytesText, countText, listed, spanText, usText } from './text.js';

const counted = (number, name) => `${number} ${name}${number === 1 ? '' : 's'}`;
// Figures of the verdict that are per second of the step, or a share of what it could do.
const RATES = ['MFU', 'tokens/s', 'samples/s'];
// Headings of what shows the run as it was recorded, whatever is switched on.
const RECORDED = [
  ...['segments', 'layers', 'time', 'communication', 'outside', 'device'].map((id) => `#h-${id}`),
  '[data-recorded]',
  ...['#h-peak', '#peak h3'],
];

// The most of each phase of a step, and what it ends with, by "step phase".
function phasesOf({ data, numMoves }, after) {
  const phases = new Map();
  const { span_move: first = [], span_step: step, span_phase: phase } = data;
  const round = (bytes) => Math.max(Math.ceil(bytes - 1e-3), 0);
  for (let at = 0; at < first.length; at += 1) {
    const key = `${step[at]} ${data.meta.phases[phase[at]]}`;
    const end = first[at + 1] ?? numMoves;
    let peak = after[first[at] - 1] || 0;
    for (let move = first[at]; move < end; move += 1) peak = Math.max(peak, after[move]);
    const known = phases.get(key)?.peak ?? 0;
    phases.set(key, { peak: Math.max(round(peak), known), end: round(after[end - 1] || 0) });
  }
  return phases;
}

function rateText(text, factor) {
  const value = Number(text.replace(/[,%]/g, '')) * factor;
  return text.includes('%') ? `${value.toFixed(1)}%` : countText(Math.round(value));
}

const shareOf = (bytes, whole) => `${((100 * bytes) / (whole || 1)).toFixed(3)}%`;

function timeSpan([low, high]) {
  const [least, most] = [low ? usText(low) : '0', usText(high)];
  return least === most ? most : `${least} to ${most}`;
}

// What a part of the page said before a switch was on, to say it again once all are off.
class Original {
  constructor() {
    this.parts = new Map();
  }

  set(node, ...content) {
    if (!node) return;
    const kept = ['class', 'aria-label', 'data-value'].map((name) => [name, node.getAttribute(name)]);
    if (!this.parts.has(node)) this.parts.set(node, { content: [...node.childNodes], kept });
    node.replaceChildren(...content);
  }

  restore() {
    for (const [node, { content, kept }] of this.parts) {
      node.replaceChildren(...content);
      for (const [name, value] of kept) if (value !== null) node.setAttribute(name, value);
    }
    this.parts.clear();
  }
}

export class Switches {
  constructor(root, data, replay, memory) {
    Object.assign(this, { root, replay, memory, capacity: data.meta.capacity });
    this.status = $('.outcome', root);
    this.card = $('#verdict');
    this.original = new Original();
    this.boxes = new Map();
    for (const holder of $$('[data-switch]', root)) this.addBox(holder, Number(holder.dataset.switch));
    // Paper has what the run itself showed.
    addEventListener('beforeprint', () => this.showRecorded());
    addEventListener('afterprint', () => this.show());
  }

  addBox(holder, number) {
    const name = `with this change: ${this.replay.switches[number].title}`;
    const box = make('input', { type: 'checkbox', role: 'switch', 'aria-label': name });
    box.addEventListener('change', () => {
      for (const rival of this.replay.rivals(number)) if (box.checked) this.boxes.get(rival).checked = false;
      this.show();
    });
    holder.append(box);
    this.boxes.set(number, box);
  }

  get on() {
    return [...this.boxes].filter(([, box]) => box.checked).map(([number]) => number);
  }

  // Switch these on and all others off.
  set(numbers) {
    for (const [number, box] of this.boxes) box.checked = numbers.includes(number);
    this.show();
  }

  showRecorded() {
    this.original.restore();
    this.memory.showAfter(null);
  }

  show() {
    const { on, replay } = this;
    this.original.restore();
    if (!on.length) {
      this.memory.showAfter(null);
      return;
    }
    const outcome = replay.run(on);
    const texts = this.texts(outcome, on.length);
    this.showFigures(outcome, texts);
    this.showFits(outcome, texts);
    this.showStep(outcome, texts);
    this.showRates(outcome, texts);
    this.showTables(outcome, texts);
    this.markOthers(texts);
    this.showBar(outcome);
    const off = make('button', { type: 'button', class: 'quiet', onclick: () => this.set([]) }, 'all off');
    const parts = [texts.peak, texts.needs, texts.step, texts.unpriced].filter(Boolean);
    this.original.set(this.status, make('b', {}, `${texts.changes} on: `), parts.join('; '), ' ', off);
    this.memory.showAfter(outcome);
  }

  texts(outcome, num) {
    const { replay } = this;
    const before = this.memory.timeline.peak.bytes;
    const { low, most } = outcome;
    const fits = replay.fits(outcome);
    const rules = listed([...new Set(outcome.unpriced)]);
    const change = before - most.bytes < 0 ? 'at most' : 'less';
    const gives = spanText(Math.max(before - most.bytes, 0), Math.max(before - low, 0));
    return {
      changes: counted(num, 'change'),
      held: spanText(low, most.bytes),
      peak: `peak ${spanText(low, most.bytes)}, ${gives} ${change}`,
      span: spanText(outcome.low, outcome.high),
      fits,
      needs: `needs ${spanText(outcome.low, outcome.high)}${fits ? `: ${fits}` : ''}`,
      step: this.stepText(outcome),
      unpriced: rules && `the price of ${rules} is not known`,
    };
  }

  stepText({ priceUs, spentOn }) {
    const { stepUs } = this.replay.room;
    if (!priceUs || !stepUs) return '';
    if (!priceUs[1]) return 'the step takes no longer';
    const [low, high] = priceUs.map((us) => `${((100 * us) / stepUs).toFixed(0)}%`);
    const share = low === high ? high : `${low} to ${high}`;
    const on = spentOn.length ? ` of ${listed(spentOn)}` : '';
    return `the step +${share} (estimated ${timeSpan(priceUs)}${on})`;
  }

  showFigures(outcome, texts) {
    const { card, original } = this;
    const { low, most } = outcome;
    const big = $('[data-figure="peak_allocated"]', card);
    original.set(big, texts.held);
    big.classList.toggle('span', low !== most.bytes);
    original.set($('.tag', big.previousElementSibling), 'estimated');
    const before = bytesText(this.memory.timeline.peak.bytes);
    const span = this.memory.timeline.span(most.move);
    const where = span ? `step ${span.step}, ${span.phase}; ` : '';
    original.set(big.nextElementSibling, `${where}with ${texts.changes}; ${before} without`);
    const reserved = $('[data-figure="peak_reserved"]', card);
    original.set(reserved, texts.span, make('small', {}, `estimated, with ${texts.changes}`));
  }

  showFits({ low, high }, texts) {
    const pill = $('.pill', this.card);
    if (!pill) return;
    const { room } = this.replay;
    const word = texts.fits || 'not known';
    this.original.set(pill, word);
    pill.className = `pill${{ fits: '', 'does not fit': ' no' }[word] ?? ' maybe'}`;
    const of = texts.fits ? ` of the ${spanText(room.low, room.high)} that it may reserve` : '';
    const text = `with ${texts.changes}: needs ${spanText(low, high)}${of}, estimated`;
    this.original.set($('[data-figure="verdict"]', this.card), text);
    this.original.set($('[data-figure="called_by"]', this.card)); // of the refusal
  }

  showStep(outcome, texts) {
    const step = $('[data-figure="step_time"]', this.card);
    if (!step) return;
    const more = make('small', {}, [texts.step, texts.unpriced].filter(Boolean).join('; '));
    const time = [...step.childNodes].filter((node) => node.nodeName !== 'SMALL');
    const price = outcome.priceUs?.[1] ? ` + ${timeSpan(outcome.priceUs)}` : '';
    this.original.set(step, ...time, price, more);
  }

  // Rates of the step, which takes longer by what the changes cost.
  showRates(outcome, texts) {
    const { stepUs } = this.replay.room;
    for (const name of RATES) {
      const node = $(`[data-figure="${name}"]`, this.card);
      if (!node) continue;
      const recorded = node.firstChild.textContent;
      const isKnown = outcome.priceUs && stepUs && !outcome.unpriced.length;
      const scaled = (us) => rateText(recorded, stepUs / (stepUs + us));
      const [most, least] = isKnown ? outcome.priceUs.map(scaled) : [recorded, recorded];
      const why = texts.unpriced || 'their price is not known';
      const more = isKnown ? `estimated, with ${texts.changes}` : `without the changes: ${why}`;
      this.original.set(node, least === most ? most : `${least} to ${most}`, make('small', {}, more));
    }
  }

  // The tables by category and by phase, with the least that the changes save.
  showTables({ least, most }, { changes }) {
    const { timeline } = this.memory;
    const set = (cell, text, value) => {
      this.original.set(cell, text);
      cell.dataset.value = value;
    };
    const held = timeline.categories.map((_, c) => Math.trunc(most.held[c]));
    for (const row of $$('#categories tbody tr')) {
      const kind = $('.chip', row).className.split('k-')[1];
      const bytes = held[timeline.colours.indexOf(kind)] ?? 0;
      const share = (100 * bytes) / (most.bytes || 1);
      set(row.cells[1], bytesText(bytes), bytes);
      set(row.cells[2], `${share.toFixed(1)}%`, share);
    }
    const phases = phasesOf(timeline, most.after);
    for (const row of $$('#phases tbody tr')) {
      const phase = phases.get(`${row.cells[0].dataset.value} ${row.cells[1].textContent.split(' ')[0]}`);
      const bytes = phase ? [phase.peak, -1, phase.end] : [-1, -1, -1]; // reserved is not known
      for (const [at, value] of bytes.entries()) set(row.cells[at + 2], value < 0 ? '-' : bytesText(value), value);
    }
    const ends = least === most ? '' : ', where they save least';
    for (const table of $$('#categories, #phases')) {
      this.mark($('h3', table.closest('.panel')), `estimated, with ${changes}${ends}`);
    }
  }

  mark(node, text) {
    this.original.set(node, ...node.childNodes, ' ', make('span', { class: 'tag' }, text));
  }

  // What is not computed again is marked.
  markOthers({ changes }) {
    const text = `without the ${changes.replace(/^1 /, '')}`;
    for (const node of $$(RECORDED.join(', '))) this.mark(node, text);
  }

  showBar(outcome) {
    const track = $('.gauge .track', this.card);
    if (!track) return;
    const { timeline } = this.memory;
    const whole = Math.max(this.capacity || 0, this.replay.room.reserved);
    const rest = outcome.high - outcome.least.bytes;
    const parts = timeline.categories
      .map((name, c) => ({ name, kind: timeline.colours[c], bytes: outcome.least.held[c] }))
      .filter(({ bytes }) => bytes >= 1);
    const bars = parts.map(({ kind, bytes }) =>
      make('i', { class: `k-${kind}`, style: `width:${shareOf(bytes, whole)}` }),
    );
    const limit = $('b', track);
    const hatched = make('i', { class: 'reserved', style: `width:${shareOf(rest, whole)}` });
    this.original.set(track, ...bars, hatched, ...(limit ? [limit] : []));
    const words = parts.map(({ name, bytes }) => `${name} ${bytesText(Math.trunc(bytes))}`);
    track.setAttribute('aria-label', `with the changes: ${words.join(', ')}, at most ${bytesText(rest)} beyond that`);
    const legend = $('.gauge .legend', this.card);
    const [unused, ...others] = [...legend.children].slice($$('.chip[class*="k-"]', legend).length);
    const chip = (kind) => make('i', { class: `chip k-${kind}` });
    const entries = parts.map(({ name, kind, bytes }) =>
      make('li', {}, chip(kind), `${name} `, make('b', {}, bytesText(Math.trunc(bytes)))),
    );
    const entry = unused.cloneNode(true);
    entry.replaceChildren($('.chip', entry), 'at most, in addition ', make('b', {}, bytesText(rest)));
    this.original.set(legend, ...entries, entry, ...others);
  }
}
