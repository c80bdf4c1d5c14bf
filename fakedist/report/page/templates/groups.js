// Who this rank talks to, and when.

// Ranks as text: 0,3,5 or 0-56:8 (every eighth from 0 to 56).
function ranksOf(text) {
  const found = [];
  for (const part of text.split(',').filter(Boolean)) {
    const [, first, last, step] = part.match(/^(\d+)(?:-(\d+)(?::(\d+))?)?$/) || [];
    for (let rank = Number(first); rank <= Number(last ?? first); rank += Number(step ?? 1)) found.push(rank);
  }
  return found;
}

// The world as a grid, one column of GPUs per node; the group's members are filled, this rank is ringed.
function drawGroup(canvas, { worldSize, perNode, rank }) {
  const width = canvas.clientWidth, nodes = Math.ceil(worldSize / perNode);
  if (width < 20) return;
  const cell = Math.max(2, Math.min(14, Math.floor(Math.sqrt(width * 150 / (nodes * perNode * 1.3)))));
  const pitch = cell + (cell > 4 ? 2 : 1), across = Math.max(1, Math.min(nodes, Math.floor(width / pitch)));
  const band = perNode * (cell + (cell > 3 ? 1 : 0)) + 4, height = Math.ceil(nodes / across) * band;
  canvas.style.height = `${height}px`;
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  const context = canvas.getContext('2d');
  context.scale(devicePixelRatio, devicePixelRatio);
  const place = (of) => {
    const node = Math.floor(of / perNode), gpu = of % perNode;
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
class CallPlot {
  constructor(canvas, data, plot) {
    this.canvas = canvas;
    this.data = data;
    this.plot = plot;
    const lanes = new Map();
    for (let call = 0; call < data.call_move.length; call += 1) {
      const key = data.call_group[call] * 4096 + data.call_operation[call];
      if (!lanes.has(key)) lanes.set(key, { group: data.call_group[call], operation: data.call_operation[call], calls: [], bytes: 0 });
      const lane = lanes.get(key);
      lane.calls.push(call);
      lane.bytes += data.call_bytes[call];
    }
    this.lanes = [...lanes.values()].sort((a, b) => b.bytes - a.bytes).slice(0, 12);
    this.most = data.call_bytes.reduce((most, bytes) => Math.max(most, bytes), 1);
    canvas.style.height = `${this.lanes.length * 34 + 6}px`;
    plot.listeners.push(() => this.draw());
    canvas.addEventListener('pointermove', (event) => this.point(event));
    canvas.addEventListener('pointerleave', () => note.hide());
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  x(move) {
    const [from, to] = this.plot.view;
    return LEFT + (move - from) / (to - from) * (this.canvas.clientWidth - LEFT - RIGHT);
  }

  draw() {
    const { canvas, data } = this, width = canvas.clientWidth, context = canvas.getContext('2d');
    canvas.width = width * devicePixelRatio;
    canvas.height = canvas.clientHeight * devicePixelRatio;
    context.scale(devicePixelRatio, devicePixelRatio);
    context.font = `12px ${colourOf('font')}`;
    this.lanes.forEach((lane, at) => {
      const floor = at * 34 + 32;
      context.fillStyle = colourOf(`g-${lane.group % 6}`);
      let last = -1, height = 0;
      for (const call of lane.calls) {
        const x = Math.round(this.x(data.call_move[call]) * devicePixelRatio) / devicePixelRatio;
        if (x < LEFT || x > width - RIGHT) continue;
        const tall = this.tall(data.call_bytes[call]);
        if (x === last && tall <= height) continue;
        height = x === last ? Math.max(height, tall) : tall;
        last = x;
        context.fillRect(x, floor - tall, Math.max(1 / devicePixelRatio, 1), tall);
      }
      context.fillStyle = colourOf('muted');
      context.textAlign = 'left';
      const name = data.meta.groups[lane.group] ? data.meta.groups[lane.group].name : '';
      context.fillText(cut(`${name} · ${data.meta.call_operations[lane.operation]}`, 80), LEFT, floor - 21);
      context.fillStyle = colourOf('line');
      context.fillRect(LEFT, floor, width - LEFT - RIGHT, 1);
    });
  }

  // The cube root keeps calls of 16 KiB and of 1 GiB both visible.
  tall(bytes) { return 1.5 + 16 * Math.cbrt(bytes / this.most); }

  point(event) {
    const lane = this.lanes[Math.floor(event.offsetY / 34)];
    if (!lane) { note.hide(); return; }
    let best = -1, away = 6;
    for (const call of lane.calls) {
      const distance = Math.abs(this.x(this.data.call_move[call]) - event.offsetX);
      if (distance < away) { away = distance; best = call; }
    }
    if (best < 0) { note.hide(); return; }
    const move = this.data.call_move[best], span = this.plot.timeline.span(move);
    note.show(event.clientX, event.clientY,
      make('p', { class: 'head' }, make('b', {}, this.data.meta.call_operations[lane.operation]), ` on ${this.data.meta.groups[lane.group].name}`),
      make('p', {}, `${bytesText(this.data.call_bytes[best])}${span ? ` · step ${span.step}, ${span.phase}` : ''}, before move ${countText(move)}`));
  }
}
