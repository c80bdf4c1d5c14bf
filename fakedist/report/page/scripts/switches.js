// Advised changes as switches: the verdict, the bar and the timeline with those that are on.

import { $, $$, make } from './dom.js';
import { bytesText, listed, spanText, usText } from './text.js';

const counted = (number, name) => `${number} ${name}${number === 1 ? '' : 's'}`;
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
    const kept = ['class', 'aria-label'].map((name) => [name, node.getAttribute(name)]);
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
