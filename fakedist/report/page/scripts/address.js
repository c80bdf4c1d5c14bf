// The page's address is a section: stay where a link has led, though charts above are drawn and the window changes.

const SETTLING_MS = 1_500; // for which a browser that loads a page still scrolls it by itself
const MOVES_BY_HAND = ['wheel', 'touchmove', 'keydown', 'pointerdown'];

// "#memory"; addresses of older pages went on with their views, "#memory&moves=100-500".
export const sectionOf = (hash) => hash.slice(1).split('&', 1)[0];

export class Address {
  constructor() {
    this.held = null; // the section that a link has led to, until the reader moves on
    addEventListener('hashchange', () => this.hold('auto'));
    for (const name of MOVES_BY_HAND) {
      addEventListener(name, () => this.release(), { capture: true, passive: true });
    }
    addEventListener('scrollend', () => this.scrolled());
    new ResizeObserver(() => this.land()).observe(document.body);
  }

  hold(behavior = 'instant') {
    this.held = document.getElementById(sectionOf(location.hash));
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
