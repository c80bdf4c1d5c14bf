'use strict';
// Shared by every part of the page: DOM helpers, figures as text, the packed numbers.

const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

// Text stays text: no part of the page writes markup from data.
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'class') node.className = value;
    else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Two decimals as Python rounds them: exact halves go to the even digit.
function twoDecimals(value) {
  const hundredfold = value * 100, below = Math.floor(hundredfold);
  if (hundredfold - below === 0.5 && below % 2 === 0) value = below / 100;
  return value.toLocaleString('en-US', { minimumFractionDigits: 2, maximumFractionDigits: 2 });
}

function bytesText(size) {
  const units = [['TiB', 2 ** 40], ['GiB', 2 ** 30], ['MiB', 2 ** 20], ['KiB', 2 ** 10]];
  for (const [unit, factor] of units) if (Math.abs(size) >= factor) return `${twoDecimals(size / factor)} ${unit}`;
  return `${size} B`;
}

const threeDigits = (amount) => amount.toFixed(Math.abs(amount) < 9.995 ? 2 : 1);

// The same text as Python's format_us.
function usText(us) {
  const size = Math.abs(us);
  if (size > 0 && size < 99.95) return `${us.toFixed(1)} µs`;
  if (size < 999.5) return `${us.toFixed(0)} µs`;
  if (size < 1e6) return `${threeDigits(us / 1e3)} ms`;
  if (size < 6e7) return `${threeDigits(us / 1e6)} s`;
  const seconds = Math.round(us / 1e6);
  return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}

const orDash = (size) => (size ? bytesText(size) : '-');
const countText = (count) => count.toLocaleString('en-US');
const cut = (text, most = 160) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
// The last part of a layer's name.
const shortName = (name) => (name.startsWith('(') ? name : name.slice(name.lastIndexOf('.') + 1));

// Axis labels: steps of 1, 2 or 5 times a power of two's thousands, so that labels are round in GiB.
function byteTicks(most, count) {
  if (!(most > 0)) return [0];
  const unit = [2 ** 40, 2 ** 30, 2 ** 20, 2 ** 10, 1].find((factor) => most >= factor) || 1;
  let step = 10 ** Math.floor(Math.log10(most / unit / count));
  for (const factor of [1, 2, 5, 10]) {
    if (most / unit / (step * factor) <= count) { step *= factor; break; }
  }
  const ticks = [];
  for (let at = 0; at * step * unit <= most; at += 1) ticks.push(at * step * unit);
  return ticks;
}

function tickText(size) {
  const text = bytesText(size);
  return text.replace(/\.00 /, ' ').replace(/(\.\d)0 /, '$1 ');
}

// ---- the packed numbers

async function unpack(text) {
  const packed = Uint8Array.fromBase64
    ? Uint8Array.fromBase64(text)
    : Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
  const block = await new Response(stream).arrayBuffer();
  const length = new DataView(block).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(block, 4, length)));
  const found = { meta: header.meta };
  for (const [name, [type, at, count]] of Object.entries(header.arrays)) {
    found[name] = unpackArray(block, 4 + length + at, type, count);
  }
  return found;
}

// Integers are stored byte by byte: the lowest bytes of all of them first.
function unpackArray(block, at, type, count) {
  if (type === 'f8') return new Float64Array(block, at, count);
  const bytes = new Uint8Array(block, at, count * Number(type[1]));
  if (type === 'u1') return bytes;
  const whole = type === 'u2' ? new Uint16Array(count) : new Uint32Array(count);
  if (type === 'u2') for (let i = 0; i < count; i += 1) whole[i] = bytes[i] | (bytes[i + count] << 8);
  else {
    for (let i = 0; i < count; i += 1) {
      whole[i] = (bytes[i] | (bytes[i + count] << 8) | (bytes[i + 2 * count] << 16) | (bytes[i + 3 * count] << 24)) >>> 0;
    }
  }
  return whole;
}

// ---- colours: defined once, in the style sheet

const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const categoryColour = (name) => colourOf(`c-${name.replace('_', '-')}`);
// A colour, with others above it, as one pixel of an image.
const pixels = new Map();
function pixelOf(...colours) {
  const key = colours.join('|');
  if (!pixels.has(key)) {
    const context = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
    for (const colour of colours) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
    pixels.set(key, new Uint32Array(context.getImageData(0, 0, 1, 1).data.buffer)[0]);
  }
  return pixels.get(key);
}

const spoken = (name) => name.replace('_', ' ');

// ---- one floating note for whatever the pointer is on

const note = {
  node: null,
  show(x, y, ...content) {
    this.node ||= document.body.appendChild(make('div', { id: 'note', role: 'presentation' }));
    this.node.replaceChildren(...content);
    this.node.style.display = 'block';
    const { width, height } = this.node.getBoundingClientRect();
    const left = x + 16 + width > innerWidth ? Math.max(4, x - width - 16) : x + 16;
    const top = y + 16 + height > innerHeight ? Math.max(4, y - height - 12) : y + 16;
    this.node.style.left = `${left}px`;
    this.node.style.top = `${top}px`;
  },
  hide() { if (this.node) this.node.style.display = 'none'; },
};
