// Who this rank talks to: the world as a picture for each group.

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

// The world as a grid, one column of GPUs per node; the group's members are filled, this rank is ringed.
export function drawGroup(canvas, { worldSize, perNode, rank }) {
  const width = canvas.clientWidth,
    nodes = Math.ceil(worldSize / perNode);
  if (width < 20) return;
  const cell = Math.max(2, Math.min(14, Math.floor(Math.sqrt((width * 150) / (nodes * perNode * 1.3)))));
  const pitch = cell + (cell > 4 ? 2 : 1),
    across = Math.max(1, Math.min(nodes, Math.floor(width / pitch)));
  const band = perNode * (cell + (cell > 3 ? 1 : 0)) + 4,
    height = Math.ceil(nodes / across) * band;
  canvas.style.height = `${height}px`;
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  const context = canvas.getContext('2d');
  context.scale(devicePixelRatio, devicePixelRatio);
  const place = (of) => {
    const node = Math.floor(of / perNode),
      gpu = of % perNode;
    return [(node % across) * pitch, Math.floor(node / across) * band + gpu * (cell + (cell > 3 ? 1 : 0))];
  };
  context.fillStyle = colourOf('line');
  for (let of = 0; of < worldSize; of += 1) context.fillRect(...place(of), cell, cell);
  context.fillStyle = colourOf('accent');
  for (const of of ranksOf(canvas.dataset.ranks)) context.fillRect(...place(of), cell, cell);
  const [x, y] = place(rank);
  context.fillStyle = colourOf('me');
  context.fillRect(x - 1, y - 1, cell + 2, cell + 2);
}

// Calls over the moves of the timeline, one lane per group and operation; it follows the timeline's view.

export function drawGroups(world) {
  for (const canvas of $$('canvas.group')) drawGroup(canvas, world);
}
