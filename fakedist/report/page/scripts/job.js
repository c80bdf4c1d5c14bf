// The page of several ranks of a job: their step on one axis, and tables that sort.

import { $ } from './dom.js';
import { openPage } from './opening.js';
import { ZoomChart } from './zoom.js';

const NEAREST = 10_000; // of the step, in the narrowest view

class LaneChart extends ZoomChart {
  constructor(root, { figures, style, step_ms: step }) {
    super(root, figures.lanes, style, { whole: [0, step], least: step / NEAREST });
  }

  layout() {
    const layout = super.layout();
    return { ...layout, showlegend: false, yaxis: { ...layout.yaxis, fixedrange: true, automargin: true } };
  }
}

openPage(({ meta }) => ({ charts: { lanes: meta.figures.lanes ? new LaneChart($('#stages'), meta) : null } }));
