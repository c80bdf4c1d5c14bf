// Take a chart out of the page as a picture: SVG, or PNG with twice the pixels. Both work offline, from a file.

import { saveFile } from './copying.js';
import { $, $$, colourOf, make, plainColour } from './dom.js';
import { groupPicture } from './groups.js';
import { plain } from './text.js';

const SCALE = 2;
const LETTER = 6.6; // pixels

export function pictureName(run, chart) {
  const name = `${run}-${chart}`.replace(/[^\w.-]+/g, '-').replace(/^[-.]+|-+$/g, '');
  return name.slice(0, 120) || 'chart';
}

const markup = (text) => plain(text).replaceAll('"', '&quot;');

// Boxes with a colour and perhaps a text, each cut at the width of its box; texts of their own; and what lies below.
export function svgOfBoxes({ width, height, boxes, texts = [], paper, ink, font, below = '' }) {
  const parts = boxes.map(({ x, y, width: wide, height: tall, colour, text }) => {
    const box = `<rect x="${round(x)}" y="${round(y)}" width="${round(wide)}" height="${round(tall)}" fill="${colour}"/>`;
    const letters = [...(text || '')].slice(0, Math.max(Math.floor((wide - 8) / LETTER), 0)).join('');
    return letters ? `${box}<text x="${round(x + 4)}" y="${round(y + tall - 6)}">${plain(letters)}</text>` : box;
  });
  for (const { x, y, text, size, colour, weight } of texts) {
    const style = `font-size="${size}" font-weight="${weight}" fill="${colour}"`;
    parts.push(`<text x="${round(x)}" y="${round(y)}" ${style}>${plain(text)}</text>`);
  }
  const size = `width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"`;
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" ${size} font-family="${markup(font)}" font-size="12" fill="${ink}">`,
    `<rect width="100%" height="100%" fill="${paper}"/>`,
    ...parts,
    below,
    '</svg>',
  ].join('\n');
}

const round = (number) => Number(number.toFixed(2));

async function svgOfChart(chart) {
  await chart.draw();
  const { holder } = chart;
  const { width, height } = holder._fullLayout;
  const layout = { ...holder.layout, paper_bgcolor: colourOf('panel') };
  const size = { width, height, format: 'svg', imageDataOnly: true };
  const svg = painted(await globalThis.Plotly.toImage({ data: holder.data, layout }, size));
  const legend = (holder.closest('.holder') || holder).previousElementSibling;
  if (!legend?.matches('.legend')) return textOf(svg);
  const above = pictureOfBars([legend]);
  svg.setAttribute('y', above.height);
  const whole = { width: Math.max(width, above.width), height: above.height + height, below: textOf(svg) };
  return svgOfBoxes(dressed({ ...above, ...whole }));
}

const textOf = (svg) => new XMLSerializer().serializeToString(svg);

// Plotly's picture, with its overview as the style sheet colours it on the page.
function painted(text) {
  const svg = new DOMParser().parseFromString(text, 'image/svg+xml').documentElement;
  const paint = (part, fill, own = {}) => {
    const style = { fill: plainColour([colourOf(fill)]), ...own };
    for (const node of $$(`[class*="rangeslider-${part}"]`, svg)) Object.assign(node.style, style);
  };
  paint('bg', 'soft');
  paint('mask', 'shade', { fillOpacity: 0.28 });
  paint('handle-m', 'panel', { stroke: plainColour([colourOf('accent')]) });
  return svg;
}

async function pngOf(svg) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = make('canvas', { width: image.width * SCALE, height: image.height * SCALE });
  canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => {
    canvas.toBlob(done, 'image/png');
  });
}

const MARGIN = 12; // pixels around bars

// Bars that are elements of the page: their boxes with a colour, and their texts, where the page has them.
function pictureOfBars(nodes) {
  const rects = nodes.map((node) => node.getBoundingClientRect());
  const left = Math.min(...rects.map((rect) => rect.left)) - MARGIN;
  const top = Math.min(...rects.map((rect) => rect.top)) - MARGIN;
  const boxes = [];
  const texts = [];
  for (const node of nodes.flatMap((each) => $$('*', each))) {
    const style = getComputedStyle(node);
    const { x, y, width, height } = node.getBoundingClientRect();
    const hatched = style.backgroundImage !== 'none' ? [[colourOf('shade')]] : [];
    const colour = plainColour([colourOf('panel')], [style.backgroundColor, style.opacity], ...hatched);
    if (width && height && colour !== plainColour([colourOf('panel')])) {
      boxes.push({ x: x - left, y: y - top, width, height, colour });
    }
    boxes.push(...lineAbove(style, x - left, y - top, width));
    for (const { text, rect } of linesOf(node)) {
      const size = Number.parseFloat(style.fontSize);
      const y = (rect.top + rect.bottom) / 2 - top + 0.35 * size;
      texts.push({ x: rect.left - left, y, text, size, colour: plainColour([style.color]), weight: style.fontWeight });
    }
  }
  const width = Math.ceil(Math.max(...rects.map((rect) => rect.right)) - left) + MARGIN;
  const height = Math.ceil(Math.max(...rects.map((rect) => rect.bottom)) - top) + MARGIN;
  return { width, height, boxes, texts };
}

// The border above an element, dots as boxes.
function lineAbove(style, x, y, width) {
  const height = Number.parseFloat(style.borderTopWidth);
  if (style.borderTopStyle === 'none' || !height || !width) return [];
  const colour = plainColour([style.borderTopColor]);
  if (style.borderTopStyle !== 'dotted') return [{ x, y, width, height, colour }];
  const dots = Array.from({ length: Math.floor(width / height / 2) }, (_, at) => x + 2 * height * at);
  return dots.map((dot) => ({ x: dot, y, width: height, height, colour }));
}

// The texts of an element itself, in lines as they are broken.
function linesOf(node) {
  const lines = [];
  for (const child of node.childNodes) {
    if (child.nodeType !== Node.TEXT_NODE) continue;
    for (const { 0: word, index } of child.data.matchAll(/\S+/g)) {
      const range = document.createRange();
      range.setStart(child, index);
      range.setEnd(child, index + word.length);
      const rect = range.getBoundingClientRect();
      const last = lines[lines.length - 1];
      if (last && last.rect.top === rect.top) last.text += ` ${word}`;
      else if (rect.width) lines.push({ text: word, rect });
    }
  }
  return lines;
}

function saveBars(run) {
  for (const bars of $$('.bar-rows, .pairs, .kinds')) {
    const panel = bars.closest('.panel');
    const title = $('h2, h3', panel).firstChild.textContent.trim().toLowerCase();
    const legend = $$('.legend', panel).filter((each) => each.nextElementSibling === bars);
    addButtons(bars, pictureName(run, title), async () => svgOfBoxes(dressed(pictureOfBars([...legend, bars]))));
  }
}

const dressed = (picture) => ({
  ...picture,
  paper: plainColour([colourOf('panel')]),
  ink: plainColour([colourOf('ink')]),
  font: colourOf('font'),
});

// Buttons below a chart, in one line with what it says about its view.
function addButtons(node, name, svg) {
  const save = {
    PNG: async () => saveFile(`${name}.png`, await pngOf(await svg()), 'image/png'),
    SVG: async () => saveFile(`${name}.svg`, await svg(), 'image/svg+xml'),
  };
  const buttons = Object.entries(save).map(([kind, onclick]) =>
    make('button', { type: 'button', class: 'quiet', title: `save this picture as ${kind}`, onclick }, kind),
  );
  const above = node.closest('.holder') || node;
  const status = above.nextElementSibling?.classList.contains('status') ? above.nextElementSibling : null;
  const foot = make('div', { class: 'foot' });
  above.after(foot);
  foot.append(...[status, make('span', { class: 'gap' }), ...buttons].filter(Boolean));
}

// Each chart of the page: those of plotly, the flame graph, bars, and the pictures of groups.
export function saveCharts({ run, world }, charts, flame) {
  for (const chart of charts) {
    const panel = chart.holder.closest('[id]');
    addButtons(chart.holder, pictureName(run, panel.id), () => svgOfChart(chart));
  }
  saveBars(run);
  if (flame) addButtons(flame.holder, pictureName(run, 'stacks'), async () => svgOfBoxes(dressed(flame.picture())));
  for (const canvas of $$('canvas.group')) {
    const title = canvas.closest('figure')?.querySelector('b, strong, code')?.textContent || 'group';
    addButtons(canvas, pictureName(run, `group-${title}`), async () => {
      const picture = groupPicture(canvas.clientWidth, canvas.dataset.ranks, world);
      const boxes = picture.boxes.map((box) => ({ ...box, colour: colourOf(box.colour) }));
      return svgOfBoxes(dressed({ ...picture, boxes }));
    });
  }
}
