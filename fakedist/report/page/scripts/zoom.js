// A chart with an axis to zoom into. Mouse, wheel, fingers, keys and buttons do the same on every such chart:
// drag to zoom in, double-click for all of it, Ctrl and wheel to zoom, Shift and wheel to move, and WASD as in Perfetto.

import { Chart } from './chart.js';
import { $$, make, note } from './dom.js';

const SETTLED_MS = 60; // the overview's handles report every pixel of their way

export class ZoomChart extends Chart {
  // `whole` and `least` are the widest and narrowest view, in the unit of `view`: not always that of the drawn axis.
  constructor(root, figure, styleNames, { whole, least }) {
    super(root, figure, styleNames);
    this.whole = [...whole];
    this.least = least;
    this.view = [...whole];
    this.listeners = []; // called with every new view
    this.fingers = new Map();
    this.pointed = null; // where the pointer is in the plot
  }

  place(at) {
    return at;
  }

  at(place) {
    return place;
  }

  layout() {
    const layout = this.figure.layout;
    const range = this.view.map((each) => this.place(each));
    const dragmode = matchMedia('(hover: none)').matches ? false : 'zoom'; // fingers scroll the page
    return { ...layout, dragmode, xaxis: { ...layout.xaxis, range, autorange: false } };
  }

  setView(from, to) {
    const [first, last] = this.whole;
    const most = last - first;
    const width = Math.min(Math.max(to - from, Math.min(this.least, most)), most);
    const start = Math.min(Math.max(from, first), last - width);
    this.show([start, start + width]);
    for (const listener of this.listeners) listener(this.view);
  }

  // Take over a view without telling the listeners: it comes from one of them.
  show(view) {
    this.view = [...view];
    this.refresh();
  }

  zoom(factor, around = (this.view[0] + this.view[1]) / 2) {
    const [from, to] = this.view;
    this.setView(around - (around - from) * factor, around + (to - around) * factor);
  }

  pan(share) {
    const width = this.view[1] - this.view[0];
    this.setView(this.view[0] + share * width, this.view[1] + share * width);
  }

  // ---- pointing: where the pointer is in the plot, in the unit of the drawn axes; null outside of it

  spot(event) {
    const { xaxis, yaxis } = this.holder._fullLayout;
    const box = this.holder.getBoundingClientRect();
    const x = event.clientX - box.left - xaxis._offset;
    const y = event.clientY - box.top - yaxis._offset;
    if (x < 0 || x > xaxis._length || y < 0 || y > yaxis._length) return null;
    return { x: xaxis.p2d(x), y: yaxis.p2d(y), perPixel: Math.abs(xaxis.p2d(1) - xaxis.p2d(0)) };
  }

  // Charts whose pointer finds more than a point override these.
  point() {}
  leave() {
    note.hide();
  }
  click() {}

  // ---- moving

  wire() {
    const { holder } = this;
    holder.tabIndex = 0;
    holder.on('plotly_relayout', (change) => this.relayed(change));
    holder.on('plotly_doubleclick', () => this.setView(...this.whole));
    holder.addEventListener('keydown', (event) => this.key(event));
    holder.addEventListener('wheel', (event) => this.wheel(event), { passive: false });
    holder.addEventListener('mousemove', (event) => {
      this.pointed = this.spot(event);
      if (this.pointed) this.point(this.pointed, event);
      else this.leave();
    });
    holder.addEventListener('mouseleave', () => {
      this.pointed = null;
      this.leave();
    });
    // plotly keeps a press from moving the focus, and keys go where the focus is.
    holder.addEventListener('pointerdown', () => holder.focus({ preventScroll: true }));
    holder.addEventListener('blur', () => this.leave());
    holder.addEventListener('click', (event) => {
      const spot = this.spot(event);
      if (spot) this.click(spot, event);
    });
    this.wireFingers();
    this.wireButtons(this.root);
  }

  // Plotly's own drag, or its overview, has moved the axis.
  relayed(change) {
    const [from, to] = change['xaxis.range'] || [change['xaxis.range[0]'], change['xaxis.range[1]']];
    if (from === undefined || to === undefined) return;
    clearTimeout(this.settling);
    this.settling = setTimeout(() => this.setView(this.at(Number(from)), this.at(Number(to))), SETTLED_MS);
  }

  wireButtons(root) {
    const acts = this.acts();
    for (const button of $$('[data-do]', root)) button.addEventListener('click', () => acts[button.dataset.do]?.());
  }

  acts() {
    return {
      whole: () => this.setView(...this.whole),
      left: () => this.pan(-0.25),
      right: () => this.pan(0.25),
      in: () => this.zoom(0.5),
      out: () => this.zoom(2),
    };
  }

  wheel(event) {
    if (event.shiftKey) this.pan((event.deltaX || event.deltaY) / 1000);
    else if (event.ctrlKey || event.metaKey) {
      const spot = this.spot(event);
      this.zoom(Math.exp(event.deltaY / 400), spot ? this.at(spot.x) : undefined);
    } else return;
    event.preventDefault();
  }

  keys() {
    const { whole, left, right, in: nearer, out } = this.acts();
    const zoom = (factor) => () => this.zoom(factor, this.pointed ? this.at(this.pointed.x) : undefined);
    const letters = { w: zoom(0.5), s: zoom(2), a: left, d: right };
    return {
      ...letters,
      ArrowLeft: left,
      ArrowRight: right,
      '+': nearer,
      '=': nearer,
      '-': out,
      0: whole,
      Escape: whole,
    };
  }

  key(event) {
    const act = this.keys()[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    note.hide();
    act(event);
  }

  // One finger moves the view, two zoom it; up and down stays the page's.
  wireFingers() {
    const { holder, fingers } = this;
    const isFinger = (event) => event.pointerType === 'touch';
    holder.addEventListener('pointerdown', (event) => isFinger(event) && fingers.set(event.pointerId, event.clientX));
    for (const end of ['pointerup', 'pointercancel', 'pointerleave']) {
      holder.addEventListener(end, (event) => fingers.delete(event.pointerId));
    }
    holder.addEventListener('pointermove', (event) => {
      const last = fingers.get(event.pointerId);
      if (!isFinger(event) || last === undefined || Math.abs(event.clientX - last) < 4) return;
      const other = [...fingers].find(([finger]) => finger !== event.pointerId);
      fingers.set(event.pointerId, event.clientX);
      if (!other) {
        this.pan((last - event.clientX) / this.holder._fullLayout.xaxis._length);
        return;
      }
      const [before, after] = [Math.abs(last - other[1]), Math.abs(event.clientX - other[1])];
      if (before > 8 && after > 8) this.zoom(before / after);
    });
  }

  buttonsFor(views) {
    return views.map(([text, from, to]) =>
      make('button', { type: 'button', onclick: () => this.setView(from, to) }, text),
    );
  }
}

// Charts of one axis show one view.
export function link(charts) {
  for (const chart of charts) {
    chart.listeners.push((view) => {
      for (const other of charts) if (other !== chart) other.show(view);
    });
  }
}
