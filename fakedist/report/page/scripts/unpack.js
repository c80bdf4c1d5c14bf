// What the page carries compressed: its numbers, and the library that draws charts.

async function inflate(text) {
  const packed = Uint8Array.fromBase64
    ? Uint8Array.fromBase64(text)
    : Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip')));
}

// Take a holder's text out of the document.
function taken(holder) {
  const text = holder.textContent.trim();
  holder.remove();
  return text;
}

// The page's policy knows the library by its hash. A page of the gallery has it in a file and so has no holder.
export async function loadLibrary(holder) {
  if (holder) {
    const script = document.createElement('script');
    script.textContent = await (await inflate(taken(holder))).text();
    document.head.append(script);
  }
  if (!globalThis.Plotly) throw new Error('plotly.js did not load');
}

export async function unpack(holder) {
  const block = await (await inflate(taken(holder))).arrayBuffer();
  const length = new DataView(block).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(block, 4, length)));
  const found = { meta: header.meta };
  for (const [name, [type, at, count]] of Object.entries(header.arrays)) {
    found[name] = unpackArray(block, 4 + length + at, type, count);
  }
  return found;
}

// Integers are stored byte by byte: the lowest bytes of all of them first.
export function unpackArray(block, at, type, count) {
  if (type === 'f8') return new Float64Array(block, at, count);
  const bytes = new Uint8Array(block, at, count * Number(type[1]));
  if (type === 'u1') return bytes;
  if (type === 'u2') {
    const whole = new Uint16Array(count);
    for (let i = 0; i < count; i += 1) whole[i] = bytes[i] | (bytes[i + count] << 8);
    return whole;
  }
  const whole = new Uint32Array(count);
  for (let i = 0; i < count; i += 1) {
    const high = (bytes[i + 2 * count] << 16) | (bytes[i + 3 * count] << 24);
    whole[i] = (bytes[i] | (bytes[i + count] << 8) | high) >>> 0;
  }
  return whole;
}
