// Figures as text, rounded as Python rounds them.

// Two decimals: exact halves go to the even digit.
function twoDecimals(size) {
  const hundredfold = size * 100;
  const below = Math.floor(hundredfold);
  const value = hundredfold - below === 0.5 && below % 2 === 0 ? below / 100 : size;
  return value.toLocaleString('en-US', { minimumFractionDigits: 2, maximumFractionDigits: 2 });
}

const UNITS = [
  ['TiB', 2 ** 40],
  ['GiB', 2 ** 30],
  ['MiB', 2 ** 20],
  ['KiB', 2 ** 10],
];

export function bytesText(size) {
  for (const [unit, factor] of UNITS) if (Math.abs(size) >= factor) return `${twoDecimals(size / factor)} ${unit}`;
  return `${size} B`;
}

// A range of bytes, as Python's span_text: "0.49 to 1.05 GiB".
export function spanText(low, high) {
  const [least, most] = [bytesText(low), bytesText(high)];
  if (least === most) return most;
  const [number, unit] = least.split(' ');
  return `${unit === most.split(' ')[1] ? number : least} to ${most}`;
}

// The unit of an axis of bytes, and its bytes: the largest that is not more than the most.
export const byteUnit = (most) => UNITS.find(([, factor]) => most >= factor) || ['B', 1];

const threeDigits = (amount) => amount.toFixed(Math.abs(amount) < 9.995 ? 2 : 1);

// The same text as Python's format_us.
export function usText(us) {
  const size = Math.abs(us);
  if (size < 0.05) return '0 µs';
  if (size < 99.95) return `${us.toFixed(1)} µs`;
  if (size < 999.5) return `${us.toFixed(0)} µs`;
  if (size < 1e6) return `${threeDigits(us / 1e3)} ms`;
  if (size < 6e7) return `${threeDigits(us / 1e6)} s`;
  const seconds = Math.round(us / 1e6);
  return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}

export const orDash = (size) => (size ? bytesText(size) : '-');
export const countText = (count) => count.toLocaleString('en-US');
export const cut = (text, most = 160) => (text.length > most ? `${text.slice(0, Math.max(most - 1, 0))}…` : text);
// A text in lines that are at most so wide, broken between words and parts of names; what is wider than a line is cut.
export function linesWithin(text, most, widthOf) {
  const lines = [];
  for (const word of text.split(/(?<=[ _])|(?<=\.)(?=\D)/)) {
    const longer = (lines[lines.length - 1] ?? '') + word;
    if (lines.length && widthOf(longer.trimEnd()) <= most) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines.map((each) => {
    const line = each.trimEnd();
    let shown = line;
    for (let letters = line.length; letters > 1 && widthOf(shown) > most; letters -= 1) shown = cut(line, letters - 1);
    return shown;
  });
}
// The last part of a layer's name.
export const shortName = (name) => (name.startsWith('(') ? name : name.slice(name.lastIndexOf('.') + 1));
// Plotly reads its texts as a kind of HTML.
export const plain = (text) => text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;');

// Items as a list in a sentence, as Python's listed: "a, b and c", or "a, and b and c".
export function listed(items) {
  if (items.length < 2) return items.join('');
  const isPlain = !items.some((item) => / and |,/.test(item));
  return `${items.slice(0, -1).join(', ')}${isPlain ? ' and' : ', and'} ${items[items.length - 1]}`;
}
