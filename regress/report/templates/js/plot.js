// Charts as SVG: lines, stacked bars, grids of cells. A mark tells what it stands for where the pointer comes near it or the
// arrow keys reach it. Texts become text nodes and values of attributes, never markup.

const LINES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#b5a900"];
const DASHES = ["", "6 4", "2 3", "8 3 2 3"];
const HEIGHT = 260, RIGHT = 14, TOP = 8, BOTTOM = 42;
const NEAR = 24; // pixels
const MANY = 200; // points of a line that has no room for a dot at each

const byId = (id) => document.getElementById(id);
const isDark = () => document.documentElement.classList.contains("dark");

function filled(found, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  found.append(...children);
  return found;
}
const svg = (tag, attributes = {}, ...children) => filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
/** An element with a class, attributes and children (elements or texts). */
const element = (tag, className = "", attributes = {}, ...children) => filled(document.createElement(tag), className ? { class: className, ...attributes } : attributes, children);

const cut = (text) => (text.length > 24 ? `${text.slice(0, 23)}…` : text);
const widest = (ticks) => Math.max(1, ...ticks.map(([, text]) => text.length)) * 6.4;
const words = (text, x, y, attributes = {}) => svg("text", { x, y, ...attributes }, text);
const rule = (x1, y1, x2, y2, attributes = {}) => svg("line", { class: "rule", x1, y1, x2, y2, ...attributes });

/** Round numbers between two, about five of them, with their texts. */
function roundNumbers(low, high) {
  const rough = (high - low) / 5, size = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].map((n) => n * size).find((n) => n >= rough * 0.999);
  const first = Math.ceil(low / step), count = Math.floor(high / step + 1e-6) - first + 1;
  return Array.from({ length: count }, (_, n) => Number(((first + n) * step).toPrecision(6))).map((n) => [n, n && Math.abs(n) < 1e-3 ? n.toExponential() : String(n)]);
}
/** The ends of some values with room around them, also where they are all the same. */
function extent(values) {
  const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (low < high) return [low - (high - low) * 0.04, high + (high - low) * 0.04];
  return low === 0 || !Number.isFinite(low) ? [-0.05, 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
}
/** The ends of an axis, and its ticks between them. */
function axisOf({ range, ticks }, values) {
  const [low, high] = range ?? extent(values);
  return { low, high, ticks: (ticks ?? roundNumbers(low, high)).filter(([at]) => at >= low && at <= high).map(([at, text]) => [at, cut(text)]) };
}
const thinned = (ticks, room) => ticks.filter((_, i) => i % Math.ceil(ticks.length / Math.max(1, Math.floor(room))) === 0);

/**
 * Draw a chart. In `spec`:
 * lines: {name, color, dash, stepped, symbol, points: [[x, y or null, title]]}, with a symbol the points alone;
 * bars: {name, color, width, points: [[x, height, title]]}, stacked; x, y: {title, range, ticks: [[value, text]]};
 * limits: {x or y, color, dash}, lines across the plane.
 */
function chart(place, spec) {
  const off = (place.off ??= new Set()), all = [...(spec.bars ?? []), ...(spec.lines ?? [])], shown = all.filter(({ name }) => !off.has(name));
  const { title = "", x = {}, y = {}, limits = [], height = HEIGHT } = spec, bottom = height - BOTTOM, stacks = new Map();
  const points = shown.flatMap((one) => one.points.filter(([, value]) => value !== null).map(([at, value]) => {
    if (one.width) stacks.set(at, (stacks.get(at) ?? 0) + value);
    return [at, value];
  }));
  const horizontal = axisOf(x, points.map(([at]) => at));
  const vertical = axisOf(stacks.size ? { ...y, range: [0, Math.max(1, ...stacks.values()) * 1.05] } : y, points.map(([, value]) => value));
  const left = 34 + widest(vertical.ticks), width = Math.max(left + 160, place.clientWidth), right = width - RIGHT;
  const across = (value) => left + ((value - horizontal.low) / (horizontal.high - horizontal.low)) * (right - left);
  const up = (value) => bottom - ((value - vertical.low) / (vertical.high - vertical.low)) * (bottom - TOP);
  const upright = (at, more) => rule(across(at), TOP, across(at), bottom, more), level = (at, more) => rule(left, up(at), right, up(at), more);
  const plot = svg("svg", { viewBox: `0 0 ${width} ${height}` },
    ...thinned(horizontal.ticks, (right - left) / (widest(horizontal.ticks) + 12)).flatMap(([at, text]) => [upright(at), words(text, across(at), bottom + 16, { "text-anchor": "middle" })]),
    ...thinned(vertical.ticks, (bottom - TOP) / 14).flatMap(([at, text]) => [level(at), words(text, left - 6, up(at) + 4, { "text-anchor": "end" })]),
    words(x.title ?? "", (left + right) / 2, height - 6, { "text-anchor": "middle" }),
    svg("text", { transform: `translate(13 ${(TOP + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, y.title ?? ""),
    ...limits.map(({ x: at, y: of, color, dash = "6 4" }) => (at === undefined ? level(of, { style: `stroke:${color}`, "stroke-dasharray": dash }) : upright(at, { style: `stroke:${color}`, "stroke-dasharray": dash }))));
  const done = new Map(), rows = shown.map(({ color, dash = "", stepped, symbol, width: wide, points: own }) => {
    let path = "", before = null;
    const marks = own.flatMap(([at, value, text]) => {
      const mark = { x: across(at), y: up(value), width: 0, height: 0, text };
      if (value === null || (wide && !value)) { before = null; return []; }
      if (wide) {
        const below = done.get(at) ?? 0;
        done.set(at, below + value);
        Object.assign(mark, { x: across(at - wide / 2), width: across(wide) - across(0), y: up(below + value), height: up(0) - up(value) });
        plot.append(svg("rect", { x: mark.x, y: mark.y, width: mark.width, height: mark.height, style: `fill:${color}` }));
      } else if (symbol) plot.append(words(symbol, mark.x, mark.y, { class: "symbol", style: `fill:${color}` }));
      else if (own.length <= MANY) plot.append(svg("circle", { cx: mark.x, cy: mark.y, r: 2.5, style: `fill:${color}` }));
      path += before === null ? `M${mark.x} ${mark.y}h0` : stepped ? `H${mark.x}V${mark.y}` : `L${mark.x} ${mark.y}`;
      before = value;
      return [mark];
    });
    if (!symbol && !wide) plot.append(svg("path", { class: "line", d: path, style: `stroke:${color}`, "stroke-dasharray": dash }));
    return marks;
  });
  const legend = element("div", "legend", {}, ...all.map(({ name, color, dash = "", symbol, width: wide }) => {
    const sample = wide ? svg("rect", { x: 5, width: 10, height: 10, style: `fill:${color}` }) : symbol ? words(symbol, 10, 5, { class: "symbol", style: `fill:${color}` })
      : svg("path", { class: "line", d: "M0 5h20", style: `stroke:${color}`, "stroke-dasharray": dash });
    const entry = element("button", "", { type: "button", "aria-pressed": String(!off.has(name)) }, svg("svg", { width: 20, height: 10, "aria-hidden": "true" }, sample), name);
    entry.addEventListener("click", () => { if (!off.delete(name)) off.add(name); chart(place, spec); place.querySelectorAll(".legend button")[all.findIndex((one) => one.name === name)].focus(); });
    return entry;
  }));
  place.replaceChildren(legend, reading(plot, rows, `${title}: ${shown.map(({ name }) => name).join(", ")}`, NEAR));
}

/** Grids of cells, each below its title: {title, bad, columns, rows: [{name, cells: [{color, sign, text, act} or undefined]}]}. */
function grids(all) {
  const tallest = Math.max(...all.map(({ rows }) => rows.length)), high = Math.min(22, Math.max(7, 260 / tallest)), left = 34, width = 250;
  return element("div", "grids", {}, ...all.map(({ title, bad, columns, rows }) => {
    const wide = Math.min(60, (width - left) / columns.length), plot = svg("svg", { viewBox: `0 0 ${width} ${rows.length * high + 18}` });
    const names = (all, room) => new Set(thinned(all.map((name, i) => [i, name]), room).map(([i]) => i));
    const [beside, below] = [names(rows, (rows.length * high) / 12), names(columns, (columns.length * wide) / 22)];
    const marks = rows.map(({ name, cells }, row) => {
      if (beside.has(row)) plot.append(words(name, left - 5, (row + 0.5) * high + 4, { "text-anchor": "end" }));
      return cells.flatMap((cell, column) => {
        if (!cell) return [];
        const box = { x: left + column * wide, y: row * high, width: wide - 1.5, height: high - 1.5 };
        plot.append(svg("rect", { class: "cell", ...box, style: `fill:${cell.color}` }));
        if (cell.sign && Math.min(wide, high) > 9) plot.append(words(cell.sign, box.x + box.width / 2, box.y + box.height / 2, { class: "symbol" }));
        return [{ ...box, text: cell.text, act: cell.act }];
      });
    });
    columns.forEach((name, i) => below.has(i) && plot.append(words(name, left + (i + 0.5) * wide, rows.length * high + 12, { "text-anchor": "middle" })));
    return element("figure", "grid", {}, element("figcaption", bad ? "bad-ink" : "", {}, title), reading(plot, marks, title, 0));
  }));
}

/** A plot whose marks, in rows, tell their texts: the one within `near` pixels of the pointer, or the one that arrow keys choose; a click and Enter act. */
function reading(plot, rows, label, near) {
  const tip = element("div", "tip", { role: "status" }), ring = svg("rect", { class: "ring", rx: 4 }), found = element("div", "read", {}, plot, tip);
  const [, , width] = plot.getAttribute("viewBox").split(" ").map(Number), middle = (mark) => mark.x + mark.width / 2;
  let row = 0, index = -1;
  const show = (mark) => {
    tip.textContent = mark?.text ?? "";
    if (!mark) return ring.remove();
    const pad = mark.width ? 1 : 5;
    plot.append(filled(ring, { x: mark.x - pad, y: mark.y - pad, width: mark.width + 2 * pad, height: mark.height + 2 * pad }, []));
    const box = plot.getBoundingClientRect(), scale = box.width / width, x = box.x + middle(mark) * scale, over = x > innerWidth / 2 ? tip.offsetWidth + 8 : -8;
    Object.assign(tip.style, { left: `${x - over}px`, top: `${Math.max(4, box.y + (mark.y - pad) * scale - tip.offsetHeight - 4)}px` });
    return undefined;
  };
  const current = () => rows[row]?.[index];
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect(), scale = width / box.width, [x, y] = [(event.clientX - box.x) * scale, (event.clientY - box.y) * scale];
    let best = near * scale + 1e-9;
    index = -1;
    rows.forEach((marks, r) => marks.forEach((mark, i) => {
      const away = Math.hypot(Math.max(mark.x - x, 0, x - mark.x - mark.width), Math.max(mark.y - y, 0, y - mark.y - mark.height));
      if (away < best) [best, row, index] = [away, r, i];
    }));
    show(current());
  });
  plot.addEventListener("pointerleave", () => { index = -1; show(); });
  plot.addEventListener("blur", () => show());
  plot.addEventListener("click", () => current()?.act?.());
  plot.addEventListener("keydown", (event) => {
    const along = { ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? 0, over = { ArrowDown: 1, ArrowUp: -1 }[event.key] ?? 0;
    if (event.key === "Enter") current()?.act?.();
    if (event.key === "Escape") show();
    if (!along && !over) return;
    event.preventDefault();
    const known = current(), filledRows = rows.flatMap((marks, r) => (marks.length ? [r] : []));
    if (!known) [row, index] = [filledRows[0] ?? 0, 0];
    else if (along) index = Math.min(rows[row].length - 1, Math.max(0, index + along));
    else {
      row = filledRows[Math.min(filledRows.length - 1, Math.max(0, filledRows.indexOf(row) + over))];
      index = rows[row].reduce((a, mark, i) => (Math.abs(middle(mark) - middle(known)) < Math.abs(middle(rows[row][a]) - middle(known)) ? i : a), 0);
    }
    show(current());
  });
  filled(plot, { tabindex: "0", role: "application", "aria-roledescription": "chart", "aria-label": `${label}. Arrow keys read the values.` }, []);
  return found;
}

/** What `packed_json` packed. */
async function unpacked(text) {
  if (!globalThis.DecompressionStream) document.querySelector("main").prepend(element("p", "note", {}, "The records cannot be shown: open this page in a browser of 2023 or later."));
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}

/** Follow the system's choice of light or dark, and the button's; draw again then, and where the window has another width. */
function startTheme(draw) {
  const system = matchMedia("(prefers-color-scheme: dark)"), set = (dark) => {
    document.documentElement.classList.toggle("dark", dark);
    document.documentElement.style.colorScheme = dark ? "dark" : "light";
  };
  set(system.matches);
  system.addEventListener("change", (event) => { set(event.matches); draw(); });
  byId("theme").addEventListener("click", () => { set(!isDark()); draw(); });
  let waiting = 0, width = innerWidth;
  addEventListener("resize", () => { if (width !== (width = innerWidth)) { clearTimeout(waiting); waiting = setTimeout(draw, 120); } });
}
