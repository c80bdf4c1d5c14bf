// The flame graph: who allocated what is held at a moment, or at one moment and not at another.

import { $, $$, make, note } from './dom.js';
import { heldByKind, mainCategory, matches, treeOf } from './stacks.js';
import { bytesText, countText, cut } from './text.js';

const ROW = 21; // pixels
const LEAST_WIDTH = 0.0007; // of the whole: about a pixel
const MOST_BOXES = 5_000;
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
    addEventListener('beforeprint', () => this.isDrawn || this.draw());
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
    this.chose?.();
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
    this.paint();
    this.tell();
  }

  paint() {
    const boxes = [];
    const above = [];
    for (let node = this.zoomed.parent; node; node = node.parent) above.unshift(node);
    for (const [row, node] of above.entries()) boxes.push({ node, row, left: 0, width: 1, isAbove: true });
    const place = (node, row, left, width) => {
      if (boxes.length >= MOST_BOXES) return;
      boxes.push({ node, row, left, width });
      let start = left;
      const children = [...node.children].sort((one, other) => other.bytes - one.bytes);
      for (const child of children) {
        const share = (width * child.bytes) / node.bytes;
        if (share < LEAST_WIDTH) break;
        place(child, row + 1, start, share);
        start += share;
      }
    };
    place(this.zoomed, above.length, 0, 1);
    this.boxes = boxes;
    const rows = boxes.reduce((most, { row }) => Math.max(most, row + 1), 0);
    const inner = make('div', { class: 'boxes', style: `height:${rows * ROW}px` });
    inner.append(...boxes.map((box, at) => this.boxOf(box, at)));
    this.holder.replaceChildren(inner);
    this.search();
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
    const found = wanted ? matches(this.stacks, this.tree, wanted) : null;
    this.holder.classList.toggle('searched', found !== null);
    for (const node of $$('.box', this.holder)) {
      node.classList.toggle('hit', found?.isHit(this.boxes[node.dataset.box].node.code) || false);
    }
    this.found = found;
    this.tell();
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
      const all = chosen.parent ? [...chosen.parent.children].sort((a, b) => b.bytes - a.bytes) : [chosen];
      return all[all.indexOf(chosen) + by];
    };
    const below = () => [...chosen.children].sort((a, b) => b.bytes - a.bytes)[0];
    const moves = {
      ArrowUp: () => chosen.parent,
      ArrowDown: below,
      ArrowLeft: () => sibling(-1),
      ArrowRight: () => sibling(1),
    };
    if (moves[event.key]) this.mark(moves[event.key]() || chosen);
    else if (event.key === 'Enter') this.zoom(chosen);
    else if (event.key === 'Escape' || event.key === '0') this.zoom(this.tree);
    else return;
    event.preventDefault();
  }

  mark(node) {
    this.chosen = node;
    if (!this.boxes.some((box) => box.node === node)) {
      this.zoomed = node.parent || node;
      this.paint();
    }
    for (const box of $$('.box', this.holder)) {
      const isChosen = this.boxes[box.dataset.box].node === node;
      box.classList.toggle('chosen', isChosen);
      if (isChosen) box.scrollIntoView({ block: 'nearest', behavior: 'instant' });
    }
    this.tell();
  }
}
