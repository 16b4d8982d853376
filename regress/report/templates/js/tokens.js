// What was computed at the tokens: their text coloured, golden and actual values, errors by position.

const ERROR = "error", MASK = "loss mask", EVERY = "";
let tokenTable = null, chosenToken = null;

const numberAt = (column, i) => (column[i] === null ? null : Number(column[i]));
const goldenAt = (values, i) => numberAt(values.golden, i);
const actualAt = (values, i) => numberAt(values.actual ?? values.golden, i);

/** How far a value is off in multiples of its tolerance; null where there is none. */
function multipleAt(values, i) {
  const golden = goldenAt(values, i), actual = actualAt(values, i);
  if (golden === null && actual === null) return null;
  if (golden === null || actual === null) return actual === null ? null : Infinity;
  if (Object.is(golden, actual) || golden === actual || (Number.isNaN(golden) && Number.isNaN(actual))) return 0;
  const error = Math.abs(actual - golden);
  return Number.isNaN(error) ? Infinity : values.tolerance ? error / Number(values.tolerance) : Infinity;
}
/** The largest of some quantities at a token. */
function worstAt(table, i, quantity = "") {
  let worst = null;
  for (const values of table.values) {
    const found = quantity && values.quantity !== quantity ? null : multipleAt(values, i);
    if (found !== null && (worst === null || found > worst)) worst = found;
  }
  return worst;
}
const textOf = (table, i) => (table.text.values.length ? table.text.values[table.text.codes[i]] : `${table.ids[i]} `);

const tints = () => (isDark() ? { none: "#1a1e23", good: "#1f5f86", bad: "#a04d10", worst: "#e06a12" } : { none: "#ffffff", good: "#9fcde8", bad: "#f9c896", worst: "#f08a3c" });

/** How a token is painted: a function of its index, and what the legend says. */
function painter(table, choice) {
  const tint = tints();
  if (choice === MASK) return { paint: (i) => (table.mask[i] ? tint.good : ""), left: "not trained on", right: "enters the loss", colors: [tint.none, tint.good] };
  const [kind, quantity] = choice.split(": ");
  if (kind === ERROR) {
    const paint = (i) => {
      const multiple = worstAt(table, i, quantity);
      if (multiple === null || multiple === 0) return "";
      return multiple <= 1 ? mix(tint.none, tint.good, 1 + Math.max(-1, Math.log10(multiple) / 8)) : mix(tint.bad, tint.worst, Math.min(1, Math.log10(multiple) / 4));
    };
    return { paint, left: "equal", right: "beyond the tolerance", colors: [tint.none, tint.good, tint.bad, tint.worst] };
  }
  const values = table.values.find((one) => one.quantity === quantity), middle = quantity === "ratio" ? 1 : 0;
  const away = (i) => (actualAt(values, i) === null ? null : actualAt(values, i) - middle);
  const most = table.ids.reduce((found, _, i) => (Number.isFinite(away(i)) ? Math.max(found, Math.abs(away(i) ?? 0)) : found), 0) || 1;
  const paint = (i) => (away(i) === null ? "" : mix(tint.none, away(i) < 0 ? tint.worst : isDark() ? "#2f86bd" : "#5fb0de", Math.min(1, Math.abs(away(i)) / most)));
  return { paint, left: short(middle - most), right: short(middle + most), colors: [tint.worst, tint.none, isDark() ? "#2f86bd" : "#5fb0de"] };
}

function drawTokens() {
  const table = tokenTable, sample = byId("token-sample").value;
  chosenToken = null;
  const { paint, left, right, colors } = painter(table, byId("token-colour").value);
  byId("token-legend").replaceChildren(...scaleKey(left, colors, right));
  const starts = startsOf(table), samples = sample === EVERY ? [...table.samples.keys()] : [Number(sample)];
  byId("token-text").replaceChildren(...samples.flatMap((n) => [
    ...(sample === EVERY ? [element("h4", "", {}, `${table.samples[n]}`)] : []),
    ...Array.from({ length: table.lengths[n] }, (_, at) => tokenOf(table, starts[n] + at, at, n, paint)),
  ]));
}
function tokenOf(table, i, at, sample, paint) {
  const mark = `${worstAt(table, i) > 1 ? " beyond" : ""}${table.mask[i] ? "" : " unread"}`;
  const token = element("span", `token${mark}`, { "data-index": String(i), "data-at": String(at), "data-sample": String(sample) }, visible(textOf(table, i)));
  const color = paint(i);
  if (color) token.style.backgroundColor = color;
  return token;
}
const startsOf = (table) => table.lengths.reduce((all, length) => [...all, all.at(-1) + length], [0]);
const visible = (text) => text.replaceAll("Ġ", " ").replaceAll("▁", " ").replaceAll("Ċ", "⏎").replaceAll("\n", "⏎") || "∅";

function tellToken(i, at, sample) {
  const table = tokenTable, rows = [];
  for (const values of table.values) {
    const multiple = multipleAt(values, i);
    if (multiple === null) continue;
    const row = element("tr");
    row.append(
      element("td", "", {}, values.quantity), element("td", "number", {}, digits(goldenAt(values, i))), element("td", "number", {}, digits(actualAt(values, i))),
      element("td", multiple > 1 ? "number bad" : "number", {}, multiple === 0 ? "equal" : multiple === Infinity ? "✗" : `${multiple > 1 ? "✗ " : ""}${short(multiple)} ×`),
    );
    rows.push(row);
  }
  const head = element("tr");
  head.append(...["quantity", "golden", "actual", "off"].map((title, n) => element("th", n ? "number" : "", { scope: "col" }, title)));
  const found = element("table");
  found.append(head, ...rows);
  byId("token-detail").replaceChildren(
    element("h3", "", { style: "margin-top:0" }, `sample ${table.samples[sample]}, position ${at}`),
    element("p", "", {}, `token ${table.ids[i]} “${visible(textOf(table, i))}”, ${table.mask[i] ? "enters the loss" : "not trained on"}`),
    rows.length ? found : element("p", "hint", {}, "No value was recorded at this token."),
  );
}
const digits = (number) => (number === null ? "–" : Number.isFinite(number) ? String(Number(number.toPrecision(7))) : short(number));

function drawPositions() {
  const table = tokenTable, lines = [];
  for (const values of table.values) {
    const worst = [];
    let i = 0;
    for (const length of table.lengths) for (let at = 0; at < length; at++, i++) {
      const multiple = multipleAt(values, i);
      if (multiple !== null) worst[at] = Math.max(worst[at] ?? 0, multiple);
    }
    const known = [...worst.entries()].filter(([, multiple]) => multiple !== undefined);
    if (known.length) lines.push(lineOf(values.quantity, lines.length, known.map(([at, multiple]) => [at, power(multiple), `${values.quantity}, position ${at}: ${timesTolerance(multiple)} tolerance`])));
  }
  if (!lines.length) return nothing("positions", "No quantity was recorded at tokens.");
  return chart(byId("positions"), { title: "By token position", lines, x: { title: "position in the sample" }, y: multiples("× tolerance"), limits: [{ y: 0, color: BEYOND }] });
}

function chooseTable() {
  tokenTable = data.tokens[Number(byId("token-table").value)];
  const starts = startsOf(tokenTable);
  const far = tokenTable.samples.map((_, n) => Math.max(0, ...Array.from({ length: tokenTable.lengths[n] }, (_, at) => worstAt(tokenTable, starts[n] + at) ?? 0)));
  options("token-sample", [[EVERY, "all"], ...tokenTable.samples.map((sample, n) => [String(n), `${far[n] > 1 ? "✗ " : ""}${sample} (${tokenTable.lengths[n]} tokens)`])]);
  const names = tokenTable.values.map((values) => values.quantity);
  options("token-colour", [[ERROR, "largest error"], [MASK, MASK], ...names.map((n) => [`${ERROR}: ${n}`, `error of ${n}`]), ...names.map((n) => [`value: ${n}`, `value of ${n}`])]);
  drawTokens();
  drawPositions();
}
function options(id, entries) {
  byId(id).replaceChildren(...entries.map(([key, text]) => element("option", "", { value: key }, text)));
}

function startTokens() {
  if (!data.tokens.length) return;
  options("token-table", data.tokens.map((table, n) => [String(n), [table.where, table.place].filter(Boolean).join("/") + (table.left_out ? ` (${table.left_out} samples left out)` : "")]));
  byId("token-table").addEventListener("change", chooseTable);
  for (const id of ["token-sample", "token-colour"]) byId(id).addEventListener("change", drawTokens);
  const text = byId("token-text");
  const tell = ({ dataset }) => tellToken(Number(dataset.index), Number(dataset.at), Number(dataset.sample));
  text.addEventListener("pointerover", (event) => { const token = event.target.closest(".token"); if (token && !chosenToken) tell(token); });
  const choose = (token) => {
    chosenToken?.classList.remove("chosen");
    chosenToken = token;
    token?.classList.add("chosen");
    token?.scrollIntoView({ block: "nearest" });
    if (token) tell(token);
  };
  text.addEventListener("click", (event) => {
    const token = event.target.closest(".token");
    choose(token === chosenToken ? null : token);
  });
  text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], all = [...text.querySelectorAll(".token")];
    if (!step || !all.length) return;
    event.preventDefault();
    choose(all[Math.min(all.length - 1, Math.max(0, all.indexOf(chosenToken) + step))]);
  });
  chooseTable();
}
