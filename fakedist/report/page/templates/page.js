// Put the parts together once the numbers are unpacked.

function wireNav() {
  const links = $$('nav a'), seen = new Map();
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) seen.set(entry.target.id, entry.isIntersecting);
    const now = links.find((link) => seen.get(link.hash.slice(1)));
    links.forEach((link) => (link === now ? link.setAttribute('aria-current', 'true') : link.removeAttribute('aria-current')));
  }, { rootMargin: '-80px 0px -55% 0px' });
  links.forEach((link) => { const section = $(link.hash); if (section) watch.observe(section); });
}

async function start() {
  wireNav();
  const holder = $('#numbers');
  const data = holder ? await unpack(holder.textContent.trim()) : null;
  if (holder) holder.remove();
  for (const table of $$('table.live')) wireTable(table, data);
  wireScrolls();
  wireCopies();
  const drawn = [];
  let plot = null;
  if (data && data.meta.num_moves && $('#timeline')) {
    const timeline = new Timeline(data);
    plot = new Plot($('#timeline'), timeline, { capacity: data.meta.capacity });
    drawn.push((now) => { plot.drawOverview(); if (now) plot.paint(); else plot.draw(); });
    plot.announce();
    plot.pin(timeline.peak.move);
    for (const button of $$('button.find')) {
      button.addEventListener('click', () => { plot.showBlock(Number(button.dataset.block)); $('#memory').scrollIntoView(); plot.canvas.focus({ preventScroll: true }); });
    }
  }
  if (data && $('#picture')) {
    const picture = new PeakPicture($('#picture'), new LayerTree(data));
    drawn.push(() => picture.draw());
  }
  if (data && data.bar_kind && $('#kernels')) {
    const kernels = new KernelPlot($('#kernels'), data);
    drawn.push((now) => (now ? kernels.paint() : kernels.draw()));
  }
  if ($('#roofline') && !(data && data.meta.roofline)) $('#roofline .none').hidden = false;
  if (data && data.meta.roofline && $('#roofline')) {
    const roofline = new Roofline($('#roofline'), data.meta.roofline);
    drawn.push(() => roofline.draw());
  }
  if (data && data.call_move && plot && $('canvas.calls')) {
    const calls = new CallPlot($('canvas.calls'), data, plot);
    drawn.push(() => calls.draw());
  }
  if (data) {
    const world = data.meta.world;
    const groups = () => $$('canvas.group').forEach((canvas) => drawGroup(canvas, world));
    drawn.push(groups);
    groups();
    addEventListener('resize', groups);
  }
  const redraw = (now) => drawn.forEach((draw) => draw(now));
  wireTheme(redraw);
  wirePrint(redraw);
  window.fakedist = { plot, data };
  document.documentElement.dataset.ready = 'yes';
}

start().catch((error) => {
  $('#trouble').hidden = false;
  $('#trouble').textContent = `The drawings of this page need a browser from 2023 or later (${error.message}); all tables are below.`;
});
