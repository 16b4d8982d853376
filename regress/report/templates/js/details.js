// One record in full.

const dialog = byId("details");
let opened = "";
const HEADS = ["status", "where", "precision", "place", "quantity", "name", "anchor", "worst", "step", "update", "rank", "micro"];
const NAMES = { over: "beyond tolerance", count: "elements", multiple: "× tolerance" };

function openDetails(record) {
  const close = element("button", "close", { type: "button" }, "close");
  close.addEventListener("click", () => dialog.close());
  const ok = isOk(record);
  const title = `${value("quantity", record)}${value("name", record) === value("quantity", record) ? "" : ` ${value("name", record)}`}`;
  dialog.replaceChildren(
    close,
    element("h2", "", {}, title),
    element("p", ok ? "good-ink" : "bad-ink", {}, `${ok ? "✓" : "✗"} ${value("status", record)} ${multipleText(multipleOf(record), ok)}${ok || !Number.isFinite(multipleOf(record)) ? "" : " tolerance"}`),
    pairs(facts(record)),
  );
  if (!dialog.open) dialog.showModal();
  history.replaceState(null, "", `#${encodeURI(value("anchor", record))}`);
  opened = location.hash;
}

/** All that is known of a record, the worst element first. */
function* facts(record) {
  yield ["place", [value("where", record), value("place", record)].filter(Boolean).join("/")];
  if (value("precision", record)) yield ["precision", value("precision", record)];
  const worst = JSON.parse(value("worst", record) || "null");
  if (worst) {
    yield ["worst", worst.where];
    yield ["golden", String(plainNumber(worst.golden))];
    yield ["actual", String(plainNumber(worst.actual))];
    for (const [name, entry] of Object.entries(worst)) {
      if (!["where", "golden", "actual"].includes(name) && entry !== null) yield [name, told(entry)];
    }
  }
  for (const name of Object.keys(data.columns)) {
    if (HEADS.includes(name)) continue;
    const entry = value(name, record);
    if (entry === null || entry === "") continue;
    yield [NAMES[name] ?? name.replaceAll("_", " "), typeof entry === "number" ? short(entry) : nested(entry)];
  }
}
function plainNumber(entry) {
  return entry?.$float ?? entry;
}
function told(entry) {
  const plain = plainNumber(entry);
  if (typeof plain === "number") return short(plain);
  if (Array.isArray(plain)) return plain.map(told).join(", ");
  if (plain === null || typeof plain !== "object") return String(plain ?? "none");
  return known(plain).map(([name, inner]) => `${name} ${told(inner)}`).join(", ");
}
/** The entries of a mapping that say anything, by their names in words. */
function known(mapping) {
  const says = (entry) => entry !== null && (typeof entry !== "object" || Object.keys(entry).length > 0);
  return Object.entries(mapping).filter(([, entry]) => says(entry)).map(([name, entry]) => [name.replaceAll("_", " "), entry]);
}
/** A text, or the mapping that it is the JSON of, a line an entry. */
function nested(text) {
  if (!text.startsWith("{")) return text;
  return known(JSON.parse(text)).map(([name, entry]) => `${name}: ${told(entry)}`).join("\n");
}
function pairs(entries) {
  const list = element("dl", "pairs");
  for (const [name, text] of entries) list.append(element("dt", "", {}, name), element("dd", "", {}, text));
  return list;
}
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
dialog.addEventListener("close", () => {
  // the event comes late: a link that was followed meanwhile has another record, and stays
  if (location.hash === opened) history.replaceState(null, "", location.pathname + location.search);
  table.focus({ preventScroll: true });
});
