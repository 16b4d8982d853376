// The records in columns, and which of them the filters leave.

const data = await unpacked(JSON.parse(byId("data").textContent));

/** The value of a record's field: a text, a number (NaN and infinities included), or null. */
function value(field, record) {
  const column = data.columns[field];
  if (!column) return null;
  if (column.codes) return column.values[column.codes[record]];
  const found = column[record];
  return typeof found === "string" ? Number(found) : found;
}
const isOk = (record) => value("status", record) === "ok";
const multipleOf = (record) => value("multiple", record) ?? 0;

/** Three digits; whole numbers as they are. */
function short(number) {
  if (number === null || number === undefined) return "";
  if (Number.isNaN(number)) return "NaN";
  if (!Number.isFinite(number)) return number > 0 ? "inf" : "-inf";
  if (Number.isInteger(number) && Math.abs(number) < 1e6) return String(number);
  const size = Math.abs(number);
  return size >= 1e-3 && size < 1e5 ? String(Number(number.toPrecision(3))) : number.toExponential(2);
}
function multipleText(multiple, ok) {
  if (multiple === 0 && ok) return "equal";
  return Number.isFinite(multiple) ? `${short(multiple)} ×` : ok ? "" : "not alike";
}

/** The text of a record that is searched in; made when it is first asked for, as most pages are never searched. */
const haystacks = [];
function haystack(record) {
  if (haystacks[record] === undefined) {
    const worst = value("worst", record);
    const parts = ["status", "where", "precision", "place", "quantity", "name", "detail", "test"].map((f) => value(f, record));
    haystacks[record] = [...parts, worst ? JSON.parse(worst).where : ""].join(" ").toLowerCase();
  }
  return haystacks[record];
}

/** What is asked for; `rank` and `micro` by a click on the heat map, undefined where they do not matter. */
const filters = { text: "", status: "", where: "", quantity: "", rank: undefined, micro: undefined };
let shown = [];

function passes(record, words, without = []) {
  const asked = (name) => !without.includes(name) && filters[name];
  if (asked("status") === "failed" && isOk(record)) return false;
  if (asked("status") && filters.status !== "failed" && value("status", record) !== filters.status) return false;
  for (const name of ["where", "quantity"]) if (asked(name) && value(name, record) !== filters[name]) return false;
  for (const name of ["rank", "micro"]) {
    if (!without.includes(name) && filters[name] !== undefined && value(name, record) !== filters[name]) return false;
  }
  return words.every((word) => haystack(record).includes(word));
}

/** The records that pass the filters, those of some names left aside. */
function selected(without = []) {
  const words = filters.text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [];
  for (let record = 0; record < data.count; record++) if (passes(record, words, without)) found.push(record);
  return found;
}
