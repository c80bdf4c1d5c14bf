// FLOP/s of kernels over FLOPs per byte: both axes in powers of ten.

class Roofline {
  constructor(root, { points, flops, bytes_per_s: bandwidth, left_out: leftOut }) {
    this.chart = $('.chart', root);
    this.points = points;
    this.roofs = Object.entries(flops).sort((a, b) => b[1] - a[1]);
    this.bandwidth = bandwidth;
    this.leftOut = leftOut;
    const most = this.roofs[0][1], ridge = most / bandwidth;
    const all = points.map((point) => point.intensity), rates = points.map((point) => point.rate);
    this.across = [Math.log10(Math.min(ridge / 30, ...all) / 2), Math.log10(Math.max(ridge * 30, ...all) * 2)];
    this.up = [Math.log10(Math.min(most / 1e3, ...rates) / 2), Math.log10(Math.max(most, ...rates) * 2)];
    new ResizeObserver(() => this.draw()).observe(this.chart);
  }

  x(intensity) { return 54 + (Math.log10(intensity) - this.across[0]) / (this.across[1] - this.across[0]) * (this.width - 64); }
  y(rate) { return 10 + (this.up[1] - Math.log10(rate)) / (this.up[1] - this.up[0]) * (this.height - 52); }

  draw() {
    this.width = this.chart.clientWidth;
    this.height = Math.min(360, Math.max(240, this.width * 0.62));
    if (this.width < 120) return;
    const drawing = svg('svg', { viewBox: `0 0 ${this.width} ${this.height}`, role: 'img', 'aria-label': 'roofline of the kernels; the table below has their rates' });
    this.axes(drawing);
    this.roofs.forEach(([dtype, peak], at) => this.roof(drawing, dtype, peak, at > 0));
    const most = Math.max(...this.points.map((point) => point.us));
    for (const point of [...this.points].sort((a, b) => b.us - a.us)) this.point(drawing, point, most);
    this.chart.replaceChildren(drawing, ...(this.leftOut ? [make('p', { class: 'muted' }, `and ${countText(this.leftOut)} that take less time`)] : []));
  }

  axes(drawing) {
    const floor = this.height - 42;
    for (let power = Math.ceil(this.across[0]); power <= this.across[1]; power += 1) {
      const x = this.x(10 ** power);
      drawing.append(svg('line', { class: 'grid', x1: x, x2: x, y1: 10, y2: floor }), this.label(x, floor + 16, 'middle', String(power < 0 ? (10 ** power).toFixed(-power) : countText(10 ** power))));
    }
    for (let power = Math.ceil(this.up[0]); power <= this.up[1]; power += 1) {
      const y = this.y(10 ** power);
      drawing.append(svg('line', { class: 'grid', x1: 54, x2: this.width - 10, y1: y, y2: y }), this.label(48, y + 4, 'end', this.rateText(10 ** power)));
    }
    drawing.append(this.label(this.width - 10, this.height - 6, 'end', 'FLOP a byte'), this.label(4, this.height - 6, 'start', 'FLOP/s'));
  }

  rateText(rate) {
    const [letter, factor] = [['P', 1e15], ['T', 1e12], ['G', 1e9], ['M', 1e6], ['k', 1e3], ['', 1]].find(([, each]) => rate >= each * 0.999) || ['', 1];
    return `${Math.round(rate / factor)} ${letter}`;
  }

  label(x, y, anchor, text, kind = '') {
    return Object.assign(svg('text', { x, y, 'text-anchor': anchor, class: kind }), { textContent: text });
  }

  roof(drawing, dtype, peak, isLower) {
    const ridge = peak / this.bandwidth, right = 10 ** this.across[1], left = Math.max(10 ** this.across[0], 10 ** this.up[0] / this.bandwidth);
    const from = isLower ? `M${this.x(ridge)} ${this.y(peak)}` : `M${this.x(left)} ${this.y(left * this.bandwidth)}L${this.x(ridge)} ${this.y(peak)}`;
    drawing.append(svg('path', { class: isLower ? 'roof lower' : 'roof', d: `${from}L${this.x(right)} ${this.y(peak)}` }));
    const y = this.y(peak) - 4;
    if (isLower && y - this.labelled < 12) return; // no room for two names
    this.labelled = y;
    drawing.append(this.label(this.width - 12, y, 'end', dtype, 'roof'));
  }

  point(drawing, { name, family, us, times, intensity, rate }, most) {
    const circle = svg('circle', { class: `f-${family}`, cx: this.x(intensity), cy: this.y(rate), r: 3 + 13 * Math.sqrt(us / most) });
    circle.addEventListener('pointermove', (event) => note.show(event.clientX, event.clientY,
      make('p', { class: 'head' }, make('b', {}, name)),
      make('p', {}, `${family}, ${countText(times)} times, ${usText(us)}`),
      make('p', {}, `${(rate / 1e12).toPrecision(3)} TFLOP/s at ${intensity.toPrecision(3)} FLOP a byte`)));
    circle.addEventListener('pointerleave', () => note.hide());
    drawing.append(circle);
  }
}
