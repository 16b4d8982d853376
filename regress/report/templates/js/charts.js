// Charts of the records that pass the filters.

const FLOOR = -8; // powers of ten of the tolerance that charts tell apart
const CEILING = (() => {
  let highest = 4;
  for (let record = 0; record < data.count; record++) {
    const found = Math.ceil(Math.log10(multipleOf(record)));
    if (Number.isFinite(found)) highest = Math.max(highest, found);
  }
  return Math.min(14, highest);
})();

/** The power of ten of a multiple, within what charts tell apart. */
function power(multiple) {
  if (Number.isNaN(multiple)) return CEILING;
  return multiple <= 0 ? FLOOR : Math.min(CEILING, Math.max(FLOOR, Math.log10(multiple)));
}
/** What counts as the multiple of a record: beyond all where it failed otherwise than by its value. */
const weight = (record) => (isOk(record) ? multipleOf(record) : Math.max(multipleOf(record), 1.0001));

/** An axis of multiples of the tolerance. */
const multiples = (title) => ({
  title, range: [FLOOR - 0.5, CEILING + 0.3],
  ticks: Array.from({ length: (CEILING - FLOOR) / 2 + 1 }, (_, i) => FLOOR + 2 * i).map((at) => [at, at === FLOOR ? "equal" : at === 0 ? "1" : `1e${at}`]),
});
const BEYOND = "var(--bad)";
const nothing = (id, words) => byId(id).replaceChildren(element("p", "", {}, words));
const lineOf = (name, i, points) => ({ name, color: LINES[i % LINES.length], dash: DASHES[Math.floor(i / LINES.length) % DASHES.length], points });
const timesTolerance = (multiple, ok = true) => multipleText(multiple, ok) || "not alike";

function mix(a, b, share) {
  const channel = (color, i) => parseInt(color.slice(1 + 2 * i, 3 + 2 * i), 16);
  return `rgb(${[0, 1, 2].map((i) => Math.round(channel(a, i) + (channel(b, i) - channel(a, i)) * share)).join(" ")})`;
}
/** What tells colours of a scale: its ends in words, and the colours between them. */
function scaleKey(left, colors, right) {
  const bar = element("i");
  bar.style.background = `linear-gradient(90deg, ${colors.join(", ")})`;
  return [left, bar, right];
}

/** A grid of ranks by microbatches for each quantity, of one replay: ranks of several are not the same ranks. A cell filters the records. */
function drawHeat(records) {
  const wheres = new Set(records.map((record) => value("where", record)));
  const gravest = records.reduce((a, b) => (a === undefined || weight(b) > weight(a) ? b : a), undefined);
  const mapped = gravest === undefined ? "" : value("where", gravest);
  if (wheres.size > 1) records = records.filter((record) => value("where", record) === mapped);
  const cells = new Map();
  for (const record of records) {
    const quantity = value("quantity", record), rank = value("rank", record), micro = value("micro", record), key = `${rank}|${micro}`;
    const of = cells.get(quantity) ?? cells.set(quantity, new Map()).get(quantity);
    const cell = of.get(key) ?? of.set(key, { multiple: 0, count: 0, failed: 0, rank, micro }).get(key);
    cell.multiple = Math.max(cell.multiple, weight(record));
    cell.count += 1;
    cell.failed += isOk(record) ? 0 : 1;
  }
  const [low, high, over, far] = isDark() ? ["#1d2a33", "#3f9fd6", "#c96a1e", "#ffd0a3"] : ["#eef4f8", "#1c7fba", "#f0a35e", "#7a2500"];
  const tint = (at) => (at <= 0 ? mix(low, high, 1 - at / FLOOR) : mix(over, far, at / CEILING));
  if (!cells.size) return nothing("heat", "No record passes the filters.");
  const name = (entry) => (entry === null ? "all" : String(entry));
  const all = data.quantities.filter((quantity) => cells.has(quantity)).map((quantity) => {
    const found = [...cells.get(quantity).values()], bad = found.some((cell) => cell.failed);
    const sorted = (field) => [...new Set(found.map((cell) => cell[field]))].sort((a, b) => (a ?? -1) - (b ?? -1));
    const micros = sorted("micro"), act = ({ rank, micro }) => () => {
      Object.assign(filters, { rank, micro, quantity, where: filters.where || mapped });
      for (const id of ["quantity", "where"]) byId(id).value = filters[id];
      apply();
      byId("records").scrollIntoView();
      table.focus({ preventScroll: true });
    };
    const cellOf = (cell) => cell && {
      color: tint(power(cell.multiple)), sign: cell.failed ? "✗" : "", act: act(cell),
      text: `${quantity}\nrank ${name(cell.rank)}, microbatch ${name(cell.micro)}\n${timesTolerance(cell.multiple, !cell.failed)} tolerance, ${cell.failed} of ${cell.count} failed`,
    };
    const rows = sorted("rank").map((rank) => ({ name: name(rank), cells: micros.map((micro) => cellOf(cells.get(quantity).get(`${rank}|${micro}`))) }));
    return { title: `${quantity}${bad ? " ✗" : ""}`, bad, columns: micros.map(name), rows };
  });
  const key = element("p", "scale", {}, ...scaleKey("equal", [low, `${high} 50%`, `${over} 50%`, far], `1e${CEILING} × tolerance`));
  const whose = element("p", "hint", {}, wheres.size > 1 ? `Of ${mapped}, the farthest of ${wheres.size}; choose another above.` : "");
  return byId("heat").replaceChildren(whose, key, grids(all));
}

/** The error of every layer, a line for each quantity. */
function drawLayers() {
  const groups = new Map();
  for (const row of data.layers) {
    if ((filters.where && row.where !== filters.where) || (filters.quantity && row.quantity !== filters.quantity)) continue;
    const of = groups.get(row.quantity) ?? groups.set(row.quantity, new Map()).get(row.quantity);
    for (const [layer, multiple] of row.layers) of.set(layer, Math.max(of.get(layer) ?? 0, Number(multiple)));
  }
  if (!groups.size) return nothing("layers", "No tensor here belongs to a layer of the model.");
  const key = (layer) => (layer === "embedding" ? -1 : layer === "head" ? 1e9 : Number(layer));
  const layers = [...new Set([...groups.values()].flatMap((of) => [...of.keys()]))].sort((a, b) => key(a) - key(b));
  const lines = data.quantities.filter((quantity) => groups.has(quantity)).map((quantity, i) => lineOf(quantity, i, layers.flatMap((layer, at) => {
    const multiple = groups.get(quantity).get(layer);
    return multiple === undefined ? [] : [[at, power(multiple), `${quantity}, layer ${layer}: ${timesTolerance(multiple)} tolerance`]];
  })));
  return chart(byId("layers"), { title: "By layer", lines, x: { title: "layer", ticks: layers.map((layer, at) => [at, layer]) }, y: multiples("× tolerance"), limits: [{ y: 0, color: BEYOND }] });
}

/** How many records are how far from their tolerance, by half powers of ten. */
function drawHistogram(records) {
  if (!records.length) return nothing("histogram", "No record passes the filters.");
  const bins = (CEILING - FLOOR) * 2, within = Array(bins + 1).fill(0), beyond = Array(bins + 1).fill(0);
  for (const record of records) {
    const bin = Math.min(bins, Math.ceil((power(weight(record)) - FLOOR) * 2));
    (isOk(record) ? within : beyond)[bin] += 1;
  }
  const bars = [["within", within, "var(--good)"], ["beyond", beyond, BEYOND]].map(([name, counts, color]) => ({
    name, color, width: 0.42, points: counts.map((count, bin) => [FLOOR + bin / 2 - 0.25, count, `${count} ${name}\nup to ${short(10 ** (FLOOR + bin / 2))} × tolerance`]),
  }));
  return chart(byId("histogram"), { title: "Against tolerance", bars, x: multiples("error in multiples of the tolerance"), y: { title: "records" }, limits: [{ x: 0, color: BEYOND }] });
}

function drawCharts() {
  drawHeat(selected(["rank", "micro"]));
  drawLayers();
  drawHistogram(shown);
}
