// What the page's address keeps: the section, the views, the selected block. "#memory&moves=100-500&block=7"

export function parse(hash) {
  const [section = '', ...pairs] = hash.replace(/^#/, '').split('&');
  const values = new Map(pairs.map((pair) => pair.split('=')).filter(([name, value]) => name && value));
  return { section, values };
}

export function written({ section, values }) {
  const pairs = [...values].map(([name, value]) => `&${name}=${value}`);
  return `#${section}${pairs.join('')}`;
}

export const rangeText = ([from, to]) => `${Math.round(from)}-${Math.round(to)}`;

// The range of a value of the address; null if it is none.
export function rangeOf(value) {
  const found = /^(\d+)-(\d+)$/.exec(value || '');
  return found && Number(found[1]) < Number(found[2]) ? [Number(found[1]), Number(found[2])] : null;
}

export class Address {
  constructor() {
    Object.assign(this, parse(location.hash));
    addEventListener('hashchange', () => this.changed());
  }

  set(name, value) {
    if (value === null) this.values.delete(name);
    else this.values.set(name, String(value));
    this.write();
  }

  // A browser allows a page few changes of its address a second.
  write() {
    this.waiting ||= setTimeout(() => {
      this.waiting = 0;
      history.replaceState(null, '', written(this));
    }, 250);
  }

  // A link of the page names a section alone: the views stay in the address.
  changed() {
    this.section = parse(location.hash).section;
    this.write();
  }

  scrollToSection() {
    if (this.section && this.values.size)
      document.getElementById(this.section)?.scrollIntoView({ behavior: 'instant' });
  }
}
