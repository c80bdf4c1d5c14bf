// The page of a run: put its parts together once its numbers are unpacked.

import { Address, rangeOf, rangeText } from './address.js';
import { axesOf } from './axis.js';
import { CallChart } from './calls.js';
import { Chart } from './chart.js';
import { $ } from './dom.js';
import { Flame } from './flame.js';
import { drawGroups } from './groups.js';
import { KernelChart, wireRows } from './kernels.js';
import { MemoryChart } from './memory.js';
import { openPage } from './opening.js';
import { PeakChart } from './peak.js';
import { Replay } from './replay.js';
import { Stacks } from './stacks.js';
import { Switches } from './switches.js';
import { Timeline } from './timeline.js';
import { link } from './zoom.js';

function memoryChart(data, address) {
  const stacks = $('#flame') && new Stacks(data);
  const memory = new MemoryChart($('#timeline'), data, new Timeline(data), axesOf(data), stacks);
  if (stacks) memory.flame = flameGraph(memory, address);
  memory.listeners.push((view) => {
    address.set('moves', rangeText(view));
    address.set('axis', memory.axis.name === 'order' ? null : memory.axis.name);
  });
  memory.chose = (chosen) => address.set('block', chosen < 0 ? null : chosen);
  address.follow((values) => {
    memory.useAxis(values.get('axis') || 'order');
    memory.setView(...(rangeOf(values.get('moves')) || memory.firstView));
    const block = Number(values.get('block') ?? -1);
    const isBlock = block >= 0 && block < data.block_kind.length;
    memory.pin(isBlock ? memory.timeline.block(block).made : memory.firstMove, isBlock ? block : -1);
  });
  document.addEventListener('click', ({ target }) => {
    const button = target.closest('button.find');
    if (!button) return;
    memory.draw();
    memory.showBlock(Number(button.dataset.block));
    $('#memory').scrollIntoView();
    memory.holder.focus({ preventScroll: true });
  });
  return memory;
}

const moveOf = (text, { timeline }) =>
  /^\d+$/.test(text || '') && Number(text) < timeline.numMoves ? Number(text) : -1;

function flameGraph(memory, address) {
  const flame = new Flame($('#flame'), memory.timeline, memory.stacks);
  memory.picked = (name, move) => flame.pick(name.toLowerCase(), move);
  flame.chose = () => {
    const { a, b } = flame.moments;
    address.set('A', a < 0 ? null : a);
    address.set('B', b < 0 ? null : b);
    address.set('stacks', flame.view === 'peak' ? null : flame.view);
  };
  address.follow((values) => {
    for (const name of ['A', 'B']) {
      const move = moveOf(values.get(name), memory);
      memory.mark(name, move);
      flame.moments[name.toLowerCase()] = move;
    }
    flame.show(values.get('stacks') || 'peak');
  });
  return flame;
}

function switchesOf(data, memory, address) {
  const switches = new Switches($('#advice'), data, new Replay(data, memory.timeline), memory);
  switches.chose = (numbers) => address.set('with', numbers.join(',') || null);
  address.follow((values) => {
    const on = (values.get('with') || '').split(',').filter((text) => /^\d+$/.test(text));
    if (on.length || switches.on.length) switches.set(on.map(Number));
  });
  return switches;
}

function kernelChart(data, address) {
  const kernels = new KernelChart($('#kernels'), data);
  wireRows(kernels);
  kernels.listeners.push((view) => address.set('kernels', rangeText(view)));
  address.follow((values) => kernels.setView(...(rangeOf(values.get('kernels')) || kernels.whole)));
  return kernels;
}

function chartsOf(data, address) {
  const { figures, style } = data.meta;
  const memory = figures.timeline ? memoryChart(data, address) : null;
  const calls = memory && figures.calls ? new CallChart($('#calls-over-time'), data, memory) : null;
  if (calls) link([memory, calls]);
  return {
    memory,
    peak: figures.peak ? new PeakChart($('#picture'), data) : null,
    device: figures.device && $('#device-use') ? new Chart($('#device-use'), figures.device, style) : null,
    segments: figures.segments ? new Chart($('#segment-map'), figures.segments, style) : null,
    kernels: figures.kernels ? kernelChart(data, address) : null,
    roofline: figures.roofline ? new Chart($('#roofline'), figures.roofline, style) : null,
    calls,
  };
}

const address = new Address();
openPage((data) => {
  const charts = chartsOf(data, address);
  const switches = charts.memory && data.meta.switches ? switchesOf(data, charts.memory, address) : null;
  return {
    charts,
    others: { switches },
    drawOthers: () => drawGroups(data.meta.world),
    done: () => address.hold('instant'),
  };
});
