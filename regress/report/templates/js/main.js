// What the reader does: filters, links, keys, light and dark.

/** Apply the filters to the table at once, and to the charts when the browser has time. */
let waiting = 0;
function apply() {
  shown = selected();
  chosen = 0;
  sortShown();
  table.scrollTop = 0;
  drawRows();
  drawChips();
  const failed = shown.filter((record) => !isOk(record)).length;
  byId("shown").value = `${shown.length.toLocaleString("en")} of ${data.count.toLocaleString("en")}${failed ? `, ${failed.toLocaleString("en")} failed` : ""}`;
  clearTimeout(waiting);
  waiting = setTimeout(drawCharts, 120);
}

/** Rank and microbatch, which have no field of their own. */
function drawChips() {
  const names = ["rank", "micro"].filter((name) => filters[name] !== undefined);
  byId("chips").replaceChildren(...names.map((name) => {
    const chip = element("button", "", { type: "button" }, `${name === "micro" ? "microbatch" : name} ${filters[name] ?? "all"} ×`);
    chip.addEventListener("click", () => { filters[name] = undefined; apply(); });
    return chip;
  }));
}

function startFilters() {
  const different = (field) => [...new Set(data.columns[field]?.values ?? [])];
  const failed = different("status").some((status) => status !== "ok");
  options("status", [["", "all"], ...(failed ? [["failed", "failed"]] : []), ...different("status").map((name) => [name, name])]);
  options("where", [["", "all"], ...different("where").map((name) => [name, name])]);
  options("quantity", [["", "all"], ...data.quantities.map((name) => [name, name])]);
  byId("search").addEventListener("input", (event) => { filters.text = event.target.value; apply(); });
  for (const id of ["status", "where", "quantity"]) byId(id).addEventListener("change", (event) => { filters[id] = event.target.value; apply(); });
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("clear").addEventListener("click", clearFilters);
}
function clearFilters() {
  Object.assign(filters, { text: "", status: "", where: "", quantity: "", rank: undefined, micro: undefined });
  for (const id of ["search", "status", "where", "quantity"]) byId(id).value = "";
  apply();
}

/** Show the record that a link names: the gravest of its place and quantity. */
function follow() {
  const name = decodeURIComponent(location.hash.slice(1));
  const column = data.columns.anchor;
  const code = name ? column?.values.indexOf(name) ?? -1 : -1;
  if (code < 0) return;
  const found = column.codes.flatMap((one, record) => (one === code ? [record] : []));
  const gravest = found.reduce((a, b) => (weight(b) > weight(a) ? b : a));
  clearFilters();
  byId("records").scrollIntoView({ behavior: "instant" });
  choose(shown.indexOf(gravest));
  openDetails(gravest);
}

function startKeys() {
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, select, textarea");
    if (event.key === "/" && !typing && !dialog.open) { event.preventDefault(); byId("search").focus(); byId("search").select(); }
    if (event.key === "Escape" && event.target.id === "search") { event.preventDefault(); clearFilters(); }
    if (event.key === "ArrowDown" && event.target.id === "search") { event.preventDefault(); table.focus(); }
  });
}

startTheme(() => { drawCharts(); if (tokenTable) { drawTokens(); drawPositions(); } });
startFilters();
startKeys();
drawHead();
apply();
startTokens();
window.addEventListener("hashchange", follow);
follow();
