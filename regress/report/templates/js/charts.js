// Charts of the records that pass the filters; plotly draws them.

const FLOOR = -8; // powers of ten of the tolerance that charts tell apart
const CEILING = (() => {
  let highest = 4;
  for (let record = 0; record < data.count; record++) {
    const found = Math.ceil(Math.log10(multipleOf(record)));
    if (Number.isFinite(found)) highest = Math.max(highest, found);
  }
  return Math.min(14, highest);
})();
const LINES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#b5a900"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const CONFIG = { displayModeBar: false, responsive: true };

const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const isDark = () => document.documentElement.classList.contains("dark");

/** The power of ten of a multiple, within what charts tell apart. */
function power(multiple) {
  if (Number.isNaN(multiple)) return CEILING;
  return multiple <= 0 ? FLOOR : Math.min(CEILING, Math.max(FLOOR, Math.log10(multiple)));
}
/** What counts as the multiple of a record: beyond all where it failed otherwise than by its value. */
const weight = (record) => (isOk(record) ? multipleOf(record) : Math.max(multipleOf(record), 1.0001));

function layout(more = {}) {
  const axis = { gridcolor: ink("line"), zeroline: false, linecolor: ink("line"), tickfont: { size: 11 }, automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink("quiet"), size: 12, family: getComputedStyle(document.body).fontFamily },
    margin: { l: 54, r: 12, t: 8, b: 42 }, hovermode: "closest", hoverlabel: { font: { size: 12 } }, showlegend: true,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    ...more, xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis },
  };
}
const powers = Array.from({ length: CEILING - FLOOR + 1 }, (_, i) => FLOOR + i);
const multipleAxis = {
  tickvals: powers.filter((p) => p % 2 === 0), range: [FLOOR - 0.3, CEILING + 0.3],
  ticktext: powers.filter((p) => p % 2 === 0).map((p) => (p === FLOOR ? "equal" : p === 0 ? "1" : `10<sup>${p}</sup>`)),
};
const limit = (axis) => ({ type: "line", [`${axis}0`]: 0, [`${axis}1`]: 0, ...(axis === "y" ? { xref: "paper", x0: 0, x1: 1 } : { yref: "paper", y0: 0, y1: 1 }), line: { color: ink("bad"), width: 1.5, dash: "dash" } });

function nothing(id, words) {
  Plotly.purge(byId(id));
  byId(id).replaceChildren(element("p", "", {}, words));
}
function draw(id, traces, settings) {
  const place = byId(id);
  if (place.firstElementChild?.tagName === "P") place.replaceChildren();
  return Plotly.react(place, traces, settings, CONFIG);
}

const scale = () => {
  const zero = -FLOOR / (CEILING - FLOOR);
  const [low, high, over, far] = isDark() ? ["#1d2a33", "#3f9fd6", "#c96a1e", "#ffd0a3"] : ["#eef4f8", "#1c7fba", "#f0a35e", "#7a2500"];
  return [[0, low], [zero, high], [zero + 1e-6, over], [1, far]];
};

/** A heat map of ranks by microbatches for each quantity, of one replay: ranks of several are not the same ranks. */
function drawHeat(records) {
  const wheres = new Set(records.map((record) => value("where", record)));
  const gravest = records.reduce((a, b) => (a === undefined || weight(b) > weight(a) ? b : a), undefined);
  mapped = gravest === undefined ? "" : value("where", gravest);
  if (wheres.size > 1) records = records.filter((record) => value("where", record) === mapped);
  byId("mapped").textContent = wheres.size > 1 ? `Of ${mapped}, the farthest of ${wheres.size}; choose another above.` : "";
  const cells = new Map();
  for (const record of records) {
    const quantity = value("quantity", record), key = `${value("rank", record)}|${value("micro", record)}`;
    const of = cells.get(quantity) ?? cells.set(quantity, new Map()).get(quantity);
    const cell = of.get(key) ?? of.set(key, { multiple: 0, count: 0, failed: 0, rank: value("rank", record), micro: value("micro", record) }).get(key);
    cell.multiple = Math.max(cell.multiple, weight(record));
    cell.count += 1;
    cell.failed += isOk(record) ? 0 : 1;
  }
  const names = data.quantities.filter((quantity) => cells.has(quantity));
  const place = byId("heat");
  if (!names.length) { place.style.height = ""; return nothing("heat", "No record passes the filters."); }
  const across = Math.max(1, Math.min(names.length, Math.floor(place.clientWidth / 250))), down = Math.ceil(names.length / across);
  const axes = {}, titles = [], traces = [];
  const name = (entry, word) => (entry === null ? "all" : `${word}${entry}`);
  const tall = Math.max(...names.map((quantity) => new Set([...cells.get(quantity).values()].map((c) => c.rank)).size));
  const height = Math.min(22, Math.max(7, 260 / tall)) * tall + 62;
  names.forEach((quantity, i) => {
    const found = [...cells.get(quantity).values()], n = i ? i + 1 : "";
    const sorted = (field) => [...new Set(found.map((cell) => cell[field]))].sort((a, b) => (a ?? -1) - (b ?? -1));
    const ranks = sorted("rank"), micros = sorted("micro");
    const at = ranks.map((rank) => micros.map((micro) => cells.get(quantity).get(`${rank}|${micro}`)));
    const grid = (f) => at.map((row) => row.map((cell) => (cell ? f(cell) : null)));
    const few = found.length <= 64;
    traces.push({
      type: "heatmap", xaxis: `x${n}`, yaxis: `y${n}`, zmin: FLOOR, zmax: CEILING, colorscale: scale(), xgap: 1.5, ygap: 1.5, hoverongaps: false,
      x: micros.map((m) => name(m, "")), y: ranks.map((r) => name(r, "")), z: grid((c) => power(c.multiple)),
      text: at.map((row) => row.map((cell) => (cell?.failed ? "✗" : ""))), ...(few ? { texttemplate: "%{text}", textfont: { size: 12 } } : {}),
      customdata: grid((c) => [c.rank, c.micro, quantity, multipleText(c.multiple, !c.failed) || "not alike", `${c.failed} of ${c.count} failed`]),
      hovertemplate: "%{customdata[2]}<br>rank %{y}, microbatch %{x}<br>%{customdata[3]} tolerance, %{customdata[4]}<extra></extra>",
      showscale: i === 0, colorbar: { orientation: "h", thickness: 10, len: 0.5, x: 1, xanchor: "right", y: 1, yanchor: "bottom", ypad: 4, tickvals: [FLOOR, -4, 0, CEILING], ticktext: ["equal", "10<sup>-4</sup>", "tolerance", `10<sup>${CEILING}</sup> ×`], tickfont: { size: 11 }, outlinewidth: 0 },
    });
    const column = i % across, row = Math.floor(i / across), gap = 0.035;
    const wide = (1 - gap * (across - 1)) / across, high = 1 / down;
    const left = column * (wide + gap), top = 1 - row * high;
    const frame = { showgrid: false, zeroline: false, tickfont: { size: 10 }, type: "category", fixedrange: true };
    axes[`xaxis${n}`] = { ...frame, domain: [left, left + wide], anchor: `y${n}`, nticks: 10 };
    axes[`yaxis${n}`] = { ...frame, domain: [top - high * (1 - 52 / height), top - high * (22 / height)], anchor: `x${n}`, autorange: "reversed", nticks: Math.min(10, ranks.length) };
    titles.push({ text: `${quantity}${found.some((c) => c.failed) ? " ✗" : ""}`, x: left, y: top - high * (20 / height), xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom", showarrow: false, font: { size: 12, color: found.some((c) => c.failed) ? ink("bad") : ink("ink") } });
  });
  const total = down * height + 44;
  place.style.height = `${total}px`;
  const base = layout({ showlegend: false, annotations: titles, height: total, margin: { l: 34, r: 8, t: 40, b: 4 } });
  delete base.xaxis; delete base.yaxis;
  return draw("heat", traces, { ...base, ...axes }).then(listen);
}
/** The replay that the heat map shows. */
let mapped = "";
/** Filter the records by a click on a cell. */
function listen(place) {
  place.removeAllListeners("plotly_click");
  place.on("plotly_click", ({ points: [{ customdata }] }) => {
    [filters.rank, filters.micro, filters.quantity] = customdata;
    if (filters.where || mapped) filters.where = mapped;
    for (const id of ["quantity", "where"]) byId(id).value = filters[id];
    apply();
    byId("records").scrollIntoView();
  });
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
  const traces = data.quantities.filter((q) => groups.has(q)).map((quantity, i) => ({
    ...line(i), name: quantity, x: layers, y: layers.map((l) => (groups.get(quantity).has(l) ? power(groups.get(quantity).get(l)) : null)),
    text: layers.map((l) => multipleText(groups.get(quantity).get(l) ?? 0, true) || "not alike"), hovertemplate: `${quantity}, layer %{x}: %{text} tolerance<extra></extra>`,
  }));
  return draw("layers", traces, layout({ yaxis: { ...multipleAxis, title: { text: "× tolerance" } }, xaxis: { type: "category", title: { text: "layer" } }, shapes: [limit("y")] }));
}
const line = (i) => ({ type: "scatter", mode: "lines+markers", connectgaps: true, line: { color: LINES[i % LINES.length], dash: DASHES[Math.floor(i / LINES.length) % 4], width: 2 }, marker: { size: 6, symbol: i % 8 } });

/** How many records are how far from their tolerance, by half powers of ten. */
function drawHistogram(records) {
  if (!records.length) return nothing("histogram", "No record passes the filters.");
  const bins = (CEILING - FLOOR) * 2, within = Array(bins + 1).fill(0), beyond = Array(bins + 1).fill(0);
  for (const record of records) {
    const bin = Math.min(bins, Math.ceil((power(weight(record)) - FLOOR) * 2));
    (isOk(record) ? within : beyond)[bin] += 1;
  }
  const x = within.map((_, bin) => FLOOR + bin / 2 - 0.25);
  const bars = (name, y, color, pattern) => ({ type: "bar", name, x, y, width: 0.42, marker: { color, pattern: { shape: pattern, size: 5, solidity: 0.35 } }, hovertemplate: `%{y} ${name}<extra></extra>` });
  return draw("histogram", [bars("within", within, ink("good"), ""), bars("beyond", beyond, ink("bad"), "/")], layout({
    barmode: "stack", bargap: 0.05, xaxis: { ...multipleAxis, title: { text: "error in multiples of the tolerance" } }, yaxis: { title: { text: "records" }, rangemode: "tozero" }, shapes: [limit("x")],
  }));
}

function drawCharts() {
  drawHeat(selected(["rank", "micro"]));
  drawLayers();
  drawHistogram(shown);
}
