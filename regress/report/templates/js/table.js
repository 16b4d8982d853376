// The table of records: only the rows in sight are in the document, so that tens of thousands scroll.

const ROW = 32; // pixels, as in the style
const COLUMNS = [
  // what failed in the order of computation, in which records come; then what came closest
  { field: "status", title: "status", sort: (r) => (isOk(r) ? data.count + 1e3 - Math.log10(Math.min(Math.max(multipleOf(r), 1e-99), 1e99)) : r) },
  { field: "where", title: "replay", sort: (r) => value("where", r) },
  { field: "place", title: "place", sort: placeKey },
  { field: "quantity", title: "quantity", sort: (r) => data.quantities.indexOf(value("quantity", r)) },
  { field: "name", title: "tensor", sort: (r) => value("name", r) },
  { field: "multiple", title: "× tolerance", number: true, sort: (r) => (isOk(r) ? 0 : 1e3) + Math.log10(Math.min(Math.max(multipleOf(r), 1e-99), 1e99)) },
  { field: "max_error", title: "max error", number: true, sort: (r) => value("max_error", r) ?? 0 },
  { field: "over", title: "beyond", number: true, sort: (r) => value("over", r) ?? 0 },
];
const order = { column: COLUMNS[0], descending: false };
let chosen = 0;

function placeKey(record) {
  const parts = ["step", "update", "rank", "micro"].map((f) => (value(f, record) ?? -1) + 1);
  return parts.reduce((key, part) => key * 4096 + part, 0);
}

const table = byId("table");
const head = element("div", "row head", { role: "row" });
const body = element("div", "body", { role: "rowgroup" });
table.append(head, body);

function drawHead() {
  head.replaceChildren(...COLUMNS.map((column) => {
    const mark = order.column === column ? (order.descending ? " ↓" : " ↑") : "";
    const sorted = mark ? (order.descending ? "descending" : "ascending") : "none";
    const button = element("button", column.number ? "number" : "", { type: "button", role: "columnheader", "aria-sort": sorted }, column.title + mark);
    button.addEventListener("click", () => {
      order.descending = order.column === column ? !order.descending : Boolean(column.number);
      order.column = column;
      sortShown();
      drawHead();
      drawRows();
    });
    return button;
  }));
}

/** Put the records that passed in order; equal ones stay as they were recorded. */
function sortShown() {
  const sign = order.descending ? -1 : 1;
  const keys = Array(data.count);
  for (const record of shown) keys[record] = order.column.sort(record);
  shown.sort((a, b) => (keys[a] < keys[b] ? -sign : keys[a] > keys[b] ? sign : a - b));
  table.setAttribute("aria-rowcount", String(shown.length + 1));
  body.style.height = `${Math.max(shown.length * ROW, 1)}px`;
}

function drawRows() {
  if (!shown.length) {
    body.replaceChildren(element("p", "empty", {}, "No record passes the filters."));
    return;
  }
  const first = Math.max(0, Math.floor(table.scrollTop / ROW) - 4);
  const last = Math.min(shown.length, first + Math.ceil(table.clientHeight / ROW) + 10);
  body.replaceChildren(...shown.slice(first, last).map((record, i) => rowOf(record, first + i)));
}

function rowOf(record, index) {
  const ok = isOk(record);
  const row = element("div", `row${index === chosen ? " chosen" : ""}`, { role: "row", "aria-rowindex": String(index + 2), "data-record": String(record) });
  row.style.top = `${index * ROW}px`;
  row.append(...COLUMNS.map((column) => {
    const text = column.field === "multiple" ? multipleText(multipleOf(record), ok)
      : column.number ? short(value(column.field, record)) : String(value(column.field, record) ?? "");
    const cell = element("div", column.number ? "number" : "mono", { role: "cell", title: text });
    if (column.field === "status") cell.append(element("span", ok ? "good-ink" : "bad-ink", {}, ok ? "✓ ok" : `✗ ${text}`));
    else if (column.field === "multiple") cell.append(bar(record, ok), element("span", ok ? "" : "bad-ink", {}, text));
    else cell.append(text);
    return cell;
  }));
  return row;
}

/** How near a record is to its tolerance, over eight orders of magnitude. */
function bar(record, ok) {
  const multiple = multipleOf(record);
  const share = ok ? (multiple > 0 ? Math.max(0, 1 + Math.log10(multiple) / 8) : 0) : 1;
  const fill = element("i");
  fill.style.width = `${Math.round(share * 100)}%`;
  return element("span", `bar${ok ? "" : " over"}`, { "aria-hidden": "true" }, fill);
}

function choose(index) {
  chosen = Math.min(Math.max(index, 0), shown.length - 1);
  const top = chosen * ROW;
  if (top < table.scrollTop) table.scrollTop = top;
  if (top + 2 * ROW > table.scrollTop + table.clientHeight) table.scrollTop = top + 2 * ROW - table.clientHeight;
  drawRows();
}

table.addEventListener("scroll", () => requestAnimationFrame(drawRows));
table.addEventListener("keydown", (event) => {
  const page = Math.floor(table.clientHeight / ROW) - 1;
  const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -shown.length, End: shown.length }[event.key];
  if (step !== undefined) { event.preventDefault(); choose(chosen + step); }
  if (event.key === "Enter" && event.target === table && shown.length) {
    event.preventDefault(); // the dialog's button has the focus by then, and would take the key for a click
    openDetails(shown[chosen]);
  }
});
body.addEventListener("click", (event) => {
  const row = event.target.closest(".row");
  if (!row) return;
  choose(shown.indexOf(Number(row.dataset.record)));
  openDetails(Number(row.dataset.record));
});
