// The parts of plotly.js that the charts of fakedist's pages need: core has scatter, and the rest follows.
const plotly = require('plotly.js/lib/core.js');

plotly.register([
  require('plotly.js/lib/bar.js'),
  require('plotly.js/lib/icicle.js'),
  require('plotly.js/lib/treemap.js'),
]);

module.exports = plotly;
