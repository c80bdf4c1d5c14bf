// What lanes of the step hold: which bars a search or a table's row means, and what bars add up to.

// Ticks of the kernels in a bar: neither the gaps between them nor their overlaps count.
const busyOf = (data, bar) => data.bar_length[bar] + data.bar_more[bar] - data.bar_less[bar];

// Bars whose kernel, lane, family or layer has the text, by time.
export function barsWith(data, text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return [];
  const { kernels, families, layers, streams } = data.meta;
  const has = (names) => names.map((name) => name.toLowerCase().includes(wanted));
  const [named, family, layer, lane] = [kernels, families, layers, streams].map(has);
  const ofKind = Array.from(
    data.bars_name,
    (name, kind) => named[name] || family[data.bars_family[kind]] || layer[data.bars_layer[kind]],
  );
  return chosen(data, (bar) => ofKind[data.bar_kind[bar]] || lane[data.bar_stream[bar]]);
}

// Bars of a table's row: of a name ("tp all_gather"), of a row of the table of kernels, or of layers with their children.
export function barsOf(data, { call, row, layers }) {
  if (call !== undefined) return chosen(data, (bar) => data.meta.kernels[data.bars_name[data.bar_kind[bar]]] === call);
  if (row !== undefined) return chosen(data, (bar) => data.bars_row[data.bar_kind[bar]] === row);
  const inside = new Uint8Array(data.layer_parent.length);
  for (const layer of layers) inside[layer] = 1;
  // Layer 0, which has no parent, is outside of modules: no other layer is below it.
  for (let layer = 1; layer < inside.length; layer += 1) {
    const above = data.layer_parent[layer];
    if (above > 1 && inside[above - 1]) inside[layer] = 1;
  }
  const communication = data.meta.families.indexOf('communication');
  return chosen(data, (bar) => {
    const kind = data.bar_kind[bar];
    return inside[data.bars_layer[kind]] && data.bars_family[kind] !== communication;
  });
}

// The layers of a folded row.
export function layersOf(data, fold) {
  let at = 0;
  for (let before = 0; before < fold; before += 1) at += data.fold_size[before];
  return data.fold_layers.subarray(at, at + data.fold_size[fold]);
}

function chosen(data, isChosen) {
  const found = [];
  for (let bar = 0; bar < data.bar_start.length; bar += 1) if (isChosen(bar)) found.push(bar);
  return found.sort((a, b) => data.bar_start[a] - data.bar_start[b]);
}

// Bars in a range of lanes that run between two moments.
export function barsBetween(data, lanes, [from, to]) {
  return chosen(data, (bar) => {
    const start = data.bar_start[bar];
    return lanes.has(data.bar_stream[bar]) && start < to && Math.max(start + data.bar_length[bar], start + 1) > from;
  });
}

// The sum of bars, in ticks; of one that a range cuts, its part in there. By lane and by kernel, most time first.
export function sumOf(data, bars, [from, to] = [-Infinity, Infinity]) {
  const sum = { num: 0, unknown: 0, ticks: 0, path: 0, isCut: false, lanes: new Map(), names: new Map() };
  for (const bar of bars) {
    const [start, length] = [data.bar_start[bar], data.bar_length[bar]];
    const inside = Math.max(Math.min(start + length, to) - Math.max(start, from), 0);
    const part = length && inside < length ? inside / length : 1;
    const ticks = busyOf(data, bar) * part;
    const kind = data.bar_kind[bar];
    const num = data.bar_num[bar];
    const isKnown = data.bars_known[kind];
    sum.num += num;
    sum.ticks += ticks;
    sum.path += data.bar_path[bar] * part;
    sum.isCut ||= part < 1;
    if (!isKnown) sum.unknown += num;
    const name = num > 1 ? 'several, merged into a bar' : data.meta.kernels[data.bars_name[kind]];
    add(sum.lanes, data.meta.streams[data.bar_stream[bar]], num, ticks);
    add(sum.names, name, num, ticks);
  }
  for (const of of ['lanes', 'names']) sum[of] = [...sum[of]].sort((a, b) => b[1].ticks - a[1].ticks);
  return sum;
}

function add(sums, name, num, ticks) {
  const sum = sums.get(name) || { num: 0, ticks: 0 };
  sum.num += num;
  sum.ticks += ticks;
  sums.set(name, sum);
}
