// The bar at the top marks the section that is in view, and on a narrow screen scrolls to its name.

import { $, $$ } from './dom.js';

function follow(link) {
  const bar = link.parentElement;
  const middle = link.offsetLeft - bar.offsetLeft + link.offsetWidth / 2;
  bar.scrollTo({ left: middle - bar.clientWidth / 2 });
}

export function wireNav() {
  const links = $$('nav a');
  const seen = new Map();
  const show = (entries) => {
    for (const entry of entries) seen.set(entry.target.id, entry.isIntersecting);
    const now = links.find((each) => seen.get(each.hash.slice(1)));
    if (now) follow(now);
    for (const each of links) {
      if (each === now) each.setAttribute('aria-current', 'true');
      else each.removeAttribute('aria-current');
    }
  };
  const watch = new IntersectionObserver(show, { rootMargin: '-80px 0px -55% 0px' });
  for (const each of links) {
    const section = $(each.hash);
    if (section) watch.observe(section);
  }
}
