// Communication peers: the world as a picture for each group.

import { $$, colourOf } from './dom.js';

// Ranks as text: 0,3,5 or 0-56:8 (every eighth from 0 to 56).
export function ranksOf(text) {
  const found = [];
  for (const part of text.split(',').filter(Boolean)) {
    const [, first, last, step] = part.match(/^(\d+)(?:-(\d+)(?::(\d+))?)?$/) || [];
    for (let rank = Number(first); rank <= Number(last ?? first); rank += Number(step ?? 1)) found.push(rank);
  }
  return found;
}

// The world as a grid, one column of GPUs per node; the group's members are filled, this rank is ringed. Its size, and
// the squares of each colour.
function groupPicture(width, ranks, { worldSize, perNode, rank }) {
  const nodes = Math.ceil(worldSize / perNode);
  const cell = Math.max(2, Math.min(14, Math.floor(Math.sqrt((width * 150) / (nodes * perNode * 1.3)))));
  const pitch = cell + (cell > 4 ? 2 : 1);
  const across = Math.max(1, Math.min(nodes, Math.floor(width / pitch)));
  const tall = cell + (cell > 3 ? 1 : 0);
  const band = perNode * tall + 4;
  const square = (of, colour, margin = 0) => {
    const node = Math.floor(of / perNode);
    const x = (node % across) * pitch - margin;
    const y = Math.floor(node / across) * band + (of % perNode) * tall - margin;
    return { x, y, width: cell + 2 * margin, height: cell + 2 * margin, colour };
  };
  const boxes = Array.from({ length: worldSize }, (_, of) => square(of, 'line'));
  boxes.push(...ranksOf(ranks).map((of) => square(of, 'accent')), square(rank, 'me', 1));
  return { width, height: Math.ceil(nodes / across) * band, boxes };
}

export function drawGroup(canvas, world) {
  const width = canvas.clientWidth;
  if (width < 20) return;
  const { height, boxes } = groupPicture(width, canvas.dataset.ranks, world);
  canvas.style.height = `${height}px`;
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  const context = canvas.getContext('2d');
  context.scale(devicePixelRatio, devicePixelRatio);
  let last = '';
  for (const box of boxes) {
    if (box.colour !== last) context.fillStyle = colourOf(box.colour);
    last = box.colour;
    context.fillRect(box.x, box.y, box.width, box.height);
  }
}

export function drawGroups(world) {
  for (const canvas of $$('canvas.group')) drawGroup(canvas, world);
}
