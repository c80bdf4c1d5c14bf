// The page of a run: put its parts together once its numbers are unpacked.

import { Address } from './address.js';
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

function memoryChart(data) {
  const stacks = $('#flame') && new Stacks(data);
  const memory = new MemoryChart($('#timeline'), data, new Timeline(data), axesOf(data), stacks);
  if (stacks) memory.flame = flameGraph(memory);
  memory.setView(...memory.firstView);
  memory.pin(memory.firstMove);
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

function flameGraph(memory) {
  const flame = new Flame($('#flame'), memory.timeline, memory.stacks);
  memory.picked = (name, move) => flame.pick(name.toLowerCase(), move);
  flame.show('peak');
  return flame;
}

function kernelChart(data) {
  const kernels = new KernelChart($('#kernels'), data);
  wireRows(kernels);
  kernels.setView(...kernels.whole);
  return kernels;
}

function chartsOf(data) {
  const { figures, style } = data.meta;
  const memory = figures.timeline ? memoryChart(data) : null;
  const calls = memory && figures.calls ? new CallChart($('#calls-over-time'), data, memory) : null;
  if (calls) link([memory, calls]);
  return {
    memory,
    peak: figures.peak ? new PeakChart($('#picture'), data) : null,
    device: figures.device && $('#device-use') ? new Chart($('#device-use'), figures.device, style) : null,
    segments: figures.segments ? new Chart($('#segment-map'), figures.segments, style) : null,
    kernels: figures.kernels ? kernelChart(data) : null,
    roofline: figures.roofline ? new Chart($('#roofline'), figures.roofline, style) : null,
    calls,
  };
}

function switchesOf(data, memory) {
  return new Switches($('#advice'), data, new Replay(data, memory.timeline), memory);
}

const address = new Address();
openPage((data) => {
  const charts = chartsOf(data);
  const switches = charts.memory && data.meta.switches ? switchesOf(data, charts.memory) : null;
  return {
    charts,
    others: { switches },
    drawOthers: () => drawGroups(data.meta.world),
    done: () => address.hold(),
  };
});
