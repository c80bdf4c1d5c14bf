// Dark or light colours, and printing.

function wireTheme(redraw) {
  const button = $('#theme'), root = document.documentElement;
  const dark = () => (root.dataset.theme || (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light')) === 'dark';
  const show = () => button.setAttribute('aria-pressed', dark());
  button.addEventListener('click', () => { root.dataset.theme = dark() ? 'light' : 'dark'; show(); redraw(); });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { show(); redraw(); });
  show();
}

// Paper is white: print in light colours, and leave folded rows folded.
function wirePrint(redraw) {
  let before, closed = [];
  addEventListener('beforeprint', () => {
    closed = $$('details:not([open])');
    closed.forEach((each) => { each.open = true; });
    before = document.documentElement.dataset.theme; document.documentElement.dataset.theme = 'light'; redraw(true);
  });
  addEventListener('afterprint', () => {
    closed.forEach((each) => { each.open = false; });
    if (before) document.documentElement.dataset.theme = before; else delete document.documentElement.dataset.theme;
    redraw();
  });
}
