// The document: finding and making elements, the style sheet's colours, and one note for whatever is pointed at.

export const $ = (selector, root = document) => root.querySelector(selector);
export const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

// Text stays text: no part of the page writes markup from data.
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'class') node.className = value;
    else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Colours are defined once, in the style sheet.
export const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// How wide a text is in a font of CSS, in pixels.
export function widthOf(text, font) {
  widthOf.context ||= make('canvas').getContext('2d');
  widthOf.context.font = font;
  return widthOf.context.measureText(text).width;
}

export const note = {
  node: null,
  show(x, y, ...content) {
    this.node ||= document.body.appendChild(make('div', { id: 'note', role: 'presentation' }));
    this.node.replaceChildren(...content);
    this.node.style.display = 'block';
    const { width, height } = this.node.getBoundingClientRect();
    const left = x + 16 + width > innerWidth ? Math.max(4, x - width - 16) : x + 16;
    const top = y + 16 + height > innerHeight ? Math.max(4, y - height - 12) : y + 16;
    this.node.style.left = `${left}px`;
    this.node.style.top = `${top}px`;
  },
  hide() {
    if (this.node) this.node.style.display = 'none';
  },
};
