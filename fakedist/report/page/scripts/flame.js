// The flame graph: who allocated what is held at a moment, or at one moment and not at another.

import { $, $$, make, note } from './dom.js';
import { heldByKind, mainCategory, matches, treeOf } from './stacks.js';
import { bytesText, countText, cut } from './text.js';

const ROW = 21; // pixels
const MARGIN_ROWS = 8; // that are drawn above and below those in view
const AHEAD = '400px 0px';
const PLACE = /^(?:.*\/)?([^/]*:\d+) \((.*)\)$/s;

// "forward model.py:12" of "examples/model.py:12 (forward)".
const shortFrame = (text) => text.replace(PLACE, '$2 $1');

export class Flame {
  constructor(root, timeline, stacks) {
    Object.assign(this, { root, timeline, stacks });
    this.holder = $('.flame', root);
    this.status = $('.status', root);
    this.view = 'peak';
    this.moments = { a: -1, b: -1 };
    this.isDrawn = false;
    this.wire();
    this.choose();
    this.reserve();
    const watch = new IntersectionObserver(
      ([{ isIntersecting }]) => {
        if (!isIntersecting) return;
        watch.disconnect();
        this.draw();
      },
      { rootMargin: AHEAD },
    );
    watch.observe(root);
  }

  get hideLibraries() {
    return $('input.hide', this.root).checked;
  }

  wire() {
    for (const button of $$('[data-view]', this.root)) {
      button.addEventListener('click', () => this.show(button.dataset.view));
    }
    for (const box of $$('input[type=checkbox]', this.root)) {
      box.addEventListener('change', () => {
        this.reserve();
        this.draw();
      });
    }
    $('input[type=search]', this.root).addEventListener('input', () => this.search());
    $('button.whole', this.root).addEventListener('click', () => this.zoom(this.tree));
    this.holder.addEventListener('click', (event) => this.clicked(event));
    this.holder.addEventListener('keydown', (event) => this.key(event));
    this.holder.addEventListener('pointermove', (event) => this.point(event));
    this.holder.addEventListener('pointerleave', () => note.hide());
    this.holder.addEventListener('scroll', () => this.fill(), { passive: true });
    new ResizeObserver(() => this.isDrawn && this.holder.clientWidth !== this.width && this.paint()).observe(
      this.holder,
    );
    addEventListener('beforeprint', () => {
      if (!this.isDrawn) this.draw();
      this.fill(true);
    });
  }

  // As much room as the deepest stack takes.
  reserve() {
    const rows = this.stacks.depth(this.hideLibraries) + 2;
    this.holder.style.height = `${Math.min(Math.max(rows, 4), 22) * ROW + 2}px`;
  }

  // ---- the moments

  pick(name, move) {
    this.moments[name] = move;
    const { a, b } = this.moments;
    this.show(a >= 0 && b >= 0 ? 'diff' : b >= 0 ? 'b' : this.view);
  }

  show(view) {
    const { a, b } = this.moments;
    this.view = (view === 'b' && b < 0) || (view === 'diff' && (a < 0 || b < 0)) ? 'peak' : view;
    this.choose();
    if (this.isDrawn) this.draw();
  }

  choose() {
    const { a, b } = this.moments;
    for (const button of $$('[data-view]', this.root)) {
      const { view } = button.dataset;
      button.setAttribute('aria-pressed', view === this.view);
      button.disabled = (view === 'b' && b < 0) || (view === 'diff' && (a < 0 || b < 0));
    }
  }

  momentText(move) {
    const span = this.timeline.span(move);
    return `event ${countText(move)}${span ? ` (step ${span.step}, ${span.phase})` : ''}`;
  }

  heading() {
    const { a, b } = this.moments;
    const { peak } = this.timeline;
    if (this.view === 'peak') return `at the peak, ${this.momentText(peak.move)}`;
    if (this.view === 'b') return `at B, ${this.momentText(b)}`;
    return `held at B, ${this.momentText(b)}, and not at A, ${this.momentText(a)}`;
  }

  // ---- drawing

  draw() {
    const { a, b } = this.moments;
    const at = this.view === 'peak' ? this.timeline.peak.move : b;
    const held = heldByKind(this.timeline, at, this.view === 'diff' ? a : -1);
    const invert = $('input.invert', this.root).checked;
    this.tree = treeOf(this.stacks, this.timeline.data, held, { hideLibraries: this.hideLibraries, invert });
    this.isDrawn = true;
    this.zoom(this.tree);
  }

  zoom(node) {
    if (!this.isDrawn) return;
    this.zoomed = node;
    this.chosen = node;
    this.isMarked = false;
    this.paint();
    this.tell();
  }

  // Place all boxes that are at least a pixel wide.
  paint() {
    const boxes = [];
    const above = [];
    this.width = this.holder.clientWidth;
    const least = 1 / Math.max(this.width, 1);
    for (let node = this.zoomed.parent; node; node = node.parent) above.unshift(node);
    for (const [row, node] of above.entries()) boxes.push({ node, row, left: 0, width: 1, isAbove: true });
    const place = (node, row, left, width) => {
      boxes.push({ node, row, left, width });
      let start = left;
      for (const child of node.children) {
        const share = (width * child.bytes) / node.bytes;
        if (share < least) break;
        place(child, row + 1, start, share);
        start += share;
      }
    };
    place(this.zoomed, above.length, 0, 1);
    this.boxes = boxes;
    const rows = boxes.reduce((most, { row }) => Math.max(most, row + 1), 0);
    this.inner = make('div', { class: 'boxes', style: `height:${rows * ROW}px` });
    this.holder.replaceChildren(this.inner);
    this.filled = [0, 0];
    this.fill();
    this.search();
  }

  // Make the boxes of the rows in view; on paper, of all.
  fill(isPaper = false) {
    if (!this.isDrawn) return;
    const { scrollTop, clientHeight } = this.holder;
    const [first, last] = [scrollTop / ROW, (scrollTop + clientHeight) / ROW];
    const [from, to] = isPaper ? [0, Infinity] : [first - MARGIN_ROWS, last + MARGIN_ROWS];
    if (!isPaper && this.filled[0] <= Math.max(first, 0) && last <= this.filled[1]) return;
    this.filled = [from, to];
    const shown = [...this.boxes.entries()].filter(([, { row }]) => row >= from && row < to);
    this.inner.replaceChildren(...shown.map(([at, box]) => this.boxOf(box, at)));
    this.outline();
  }

  boxOf({ node, row, left, width, isAbove }, at) {
    const kind = this.kindOf(node);
    const style = `left:${left * 100}%;width:${width * 100}%;top:${row * ROW}px`;
    const text = width > 0.012 ? cut(this.shortText(node), 120) : '';
    return make('div', { class: `box ${kind}${isAbove ? ' above' : ''}`, style, 'data-box': at }, text);
  }

  kindOf(node) {
    if (node.code < 0) return 'all';
    if (node.code < this.stacks.texts.length) return this.stacks.isLibrary(node.code) ? 'library' : 'own';
    return `operation k-${this.timeline.colours[mainCategory(node)] || 'other'}`;
  }

  textOf(node) {
    return node.code < 0 ? 'all' : this.stacks.text(node.code);
  }

  shortText(node) {
    return node.code < 0 ? `all ${bytesText(node.bytes)}` : shortFrame(this.textOf(node));
  }

  search() {
    if (!this.isDrawn) return;
    const wanted = $('input[type=search]', this.root).value.trim();
    this.found = wanted ? matches(this.stacks, this.tree, wanted) : null;
    this.holder.classList.toggle('searched', this.found !== null);
    this.outline();
    this.tell();
  }

  // Mark what was searched for, and the box that the keyboard is at.
  outline() {
    for (const box of $$('.box', this.holder)) {
      const { node } = this.boxes[box.dataset.box];
      box.classList.toggle('hit', this.found?.isHit(node.code) || false);
      box.classList.toggle('chosen', this.isMarked && node === this.chosen);
    }
  }

  // ---- what is pointed at, and the way to it

  boxAt(event) {
    const box = event.target.closest('.box');
    return box ? this.boxes[box.dataset.box] : null;
  }

  clicked(event) {
    const box = this.boxAt(event);
    if (box) this.zoom(box.node === this.zoomed && box.node.parent ? box.node.parent : box.node);
  }

  point(event) {
    const box = this.boxAt(event);
    if (!box) note.hide();
    else
      note.show(
        event.clientX,
        event.clientY,
        make('p', { class: 'head' }, make('b', {}, cut(this.textOf(box.node), 400))),
        this.sizeOf(box.node),
      );
  }

  sizeOf(node) {
    const share = this.tree.bytes ? `, ${((100 * node.bytes) / this.tree.bytes).toFixed(1)}%` : '';
    return `${bytesText(node.bytes)}${share}, ${countText(node.num)} block${node.num === 1 ? '' : 's'}`;
  }

  tell() {
    const { chosen, found } = this;
    const where = chosen.code < 0 ? '' : ` · ${cut(this.textOf(chosen), 200)}: ${this.sizeOf(chosen)}`;
    const hit = found
      ? ` · found ${bytesText(found.bytes)}, ${((100 * found.bytes) / (this.tree.bytes || 1)).toFixed(1)}%`
      : '';
    const total = this.tree.num ? this.sizeOf(this.tree).replace(', 100.0%', '') : 'nothing';
    this.status.textContent = `${this.heading()}: ${total}${where}${hit}`;
  }

  // Up to the caller, down to the largest call, left and right among the calls of one caller.
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.isDrawn) return;
    const { chosen } = this;
    const sibling = (by) => {
      const all = chosen.parent ? chosen.parent.children : [chosen];
      return all[all.indexOf(chosen) + by];
    };
    const moves = {
      ArrowUp: () => chosen.parent,
      ArrowDown: () => chosen.children[0],
      ArrowLeft: () => sibling(-1),
      ArrowRight: () => sibling(1),
    };
    Object.assign(moves, { a: moves.ArrowLeft, d: moves.ArrowRight });
    if (moves[event.key]) this.mark(moves[event.key]() || chosen);
    else if (event.key === 'Enter' || event.key === 'w') this.zoom(chosen);
    else if (event.key === 's') this.zoom(this.zoomed.parent || this.tree);
    else if (event.key === 'Escape' || event.key === '0') this.zoom(this.tree);
    else return;
    event.preventDefault();
  }

  mark(node) {
    this.chosen = node;
    this.isMarked = true;
    let box = this.boxes.find((each) => each.node === node);
    if (!box) {
      this.zoomed = node.parent || node;
      this.paint();
      box = this.boxes.find((each) => each.node === node);
    }
    const { holder } = this;
    const top = (box?.row ?? 0) * ROW;
    if (top < holder.scrollTop) holder.scrollTop = top;
    else if (top + ROW > holder.scrollTop + holder.clientHeight) holder.scrollTop = top + ROW - holder.clientHeight;
    this.fill();
    this.outline();
    this.tell();
  }
}
