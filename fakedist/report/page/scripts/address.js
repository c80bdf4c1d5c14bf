// What the page's address keeps: the section, the views, the selected block. "#memory&moves=100-500&block=7"

export function parse(hash) {
  const [section = '', ...pairs] = hash.replace(/^#/, '').split('&');
  const values = new Map(pairs.map((pair) => pair.split('=')).filter(([name, value]) => name && value));
  return { section, values };
}

export function written({ section, values }) {
  const pairs = [...values].map(([name, value]) => `&${name}=${value}`);
  return `#${section}${pairs.join('')}`;
}

export const rangeText = ([from, to]) => `${Math.round(from)}-${Math.round(to)}`;

// The range of a value of the address; null if it is none.
export function rangeOf(value) {
  const found = /^(\d+)-(\d+)$/.exec(value || '');
  return found && Number(found[1]) < Number(found[2]) ? [Number(found[1]), Number(found[2])] : null;
}

const WRITE_MS = 250; // a browser allows a page few changes of its address a second
const SETTLING_MS = 1_500; // for which a browser that loads a page still scrolls it by itself
const MOVES_BY_HAND = ['wheel', 'touchmove', 'keydown', 'pointerdown'];

export class Address {
  constructor() {
    Object.assign(this, parse(location.hash));
    this.parts = [];
    this.held = null; // the section that a link has led to, until the reader moves on
    addEventListener('hashchange', () => this.changed());
    addEventListener('click', () => this.flush(), true); // it may be a link, which makes a new entry of the history
    for (const name of MOVES_BY_HAND) {
      addEventListener(name, () => this.release(), { capture: true, passive: true });
    }
    addEventListener('scrollend', () => this.scrolled());
    new ResizeObserver(() => this.land()).observe(document.body);
  }

  // A part of the page that shows what the address says: now, and when another address of the page is opened.
  follow(show) {
    this.parts.push(show);
    this.read(show);
  }

  read(show) {
    this.isReading = true;
    show(this.values);
    this.isReading = false;
  }

  set(name, value) {
    if (this.isReading) return;
    if (value === null) this.values.delete(name);
    else this.values.set(name, String(value));
    this.write();
  }

  write() {
    this.waiting ||= setTimeout(() => this.flush(), WRITE_MS);
  }

  flush() {
    if (!this.waiting) return;
    clearTimeout(this.waiting);
    this.waiting = 0;
    history.replaceState({ isKept: true }, '', written(this));
  }

  // A link of the page names a section alone: the views stay. Back, and addresses that were typed or pasted, have
  // views of their own.
  changed() {
    const { section, values } = parse(location.hash);
    const isBack = history.state?.isKept;
    this.section = section;
    if (isBack || values.size) {
      this.values = values;
      for (const show of this.parts) this.read(show);
    }
    if (!isBack) this.hold();
    this.write();
  }

  // ---- landing where a link points

  // Keep the section where the link led, though charts above it are drawn and the window changes.
  hold(behavior = 'auto') {
    this.held = (this.section && document.getElementById(this.section)) || null;
    this.settledAt = performance.now() + SETTLING_MS;
    this.land(behavior);
  }

  land(behavior = 'instant') {
    if (!this.held) return;
    this.held.scrollIntoView({ behavior });
    this.size = sizeNow();
  }

  release() {
    this.held = null;
  }

  // The reader has dragged the scroll bar, unless charts above have another height now, or the page ends.
  scrolled() {
    if (!this.held || this.size !== sizeNow()) return;
    const { scrollHeight } = document.documentElement;
    const top = Number.parseFloat(getComputedStyle(document.documentElement).scrollPaddingTop) || 0;
    const isEnd = this.held.getBoundingClientRect().top > top && scrollY + innerHeight > scrollHeight - 2;
    if (isEnd || Math.abs(this.held.getBoundingClientRect().top - top) <= 2) return;
    if (performance.now() < this.settledAt) this.land();
    else this.release();
  }
}

const sizeNow = () => `${innerWidth} ${document.documentElement.scrollHeight}`;

// The reports of a sweep lie below its page: an address from elsewhere is not followed.
export function isReport(path) {
  return /^(?:runs\/[0-9a-f]+\/)?rank\d+\/report\.html$/.test(path);
}
