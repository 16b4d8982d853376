// Charts of one or two runs; plotly draws them. Texts of a run reach the page as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const LINES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#b5a900"];
const DASHES = ["solid", "dot"]; // the first run, the second
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A text for plotly, which reads a few tags. */
const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

/** The last part of a metric's name, or all of it where two would look alike. */
function shortName(metric, metrics) {
  const last = metric.split("/").slice(1).join("/") || metric;
  return metrics.filter((other) => other.endsWith(`/${last}`)).length > 1 ? metric : last;
}

function layout() {
  const axis = { gridcolor: ink("line"), zeroline: false, linecolor: ink("line"), tickfont: { size: 11 }, automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink("quiet"), size: 12, family: getComputedStyle(document.body).fontFamily },
    margin: { l: 54, r: 12, t: 8, b: 42 }, hovermode: "closest", hoverlabel: { font: { size: 12 } }, showlegend: true,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    xaxis: { ...axis, title: { text: "step" } }, yaxis: axis, shapes: resumes(),
  };
}

/** A dotted line where a segment goes on from a checkpoint. */
function resumes() {
  return data.runs.flatMap((run, number) => run.segments.filter((segment) => segment.resumed_from !== null).map((segment) => ({
    type: "line", x0: segment.step, x1: segment.step, yref: "paper", y0: 0, y1: 1, line: { color: LINES[number], width: 1, dash: "dot" },
  })));
}

const STAGE = "curriculum/current_stage";

/** The name of a curriculum's stage at a step. */
function stageName(run, step) {
  return run.texts["curriculum/stage_name"]?.findLast(([at]) => at === step)?.[1];
}

/** Name and round of a curriculum's stage, beside its number. */
function stageWords(run, metric, step) {
  if (metric !== STAGE) return "";
  const name = stageName(run, step), rounds = run.series["curriculum/round"], at = rounds?.step.lastIndexOf(step) ?? -1;
  return `${name === undefined ? "" : `, ${plain(name)}`}${at < 0 ? "" : `, round ${rounds.value[at]}`}`;
}

/** Names of stages as labels of the axis, where all runs give a stage the same one. */
function stageTicks(metrics) {
  if (!metrics.includes(STAGE)) return {};
  const names = new Map();
  for (const run of data.runs) run.series[STAGE]?.value.forEach((stage, i) => {
    const name = stageName(run, run.series[STAGE].step[i]) ?? "";
    if (stage !== null) names.set(stage, names.has(stage) && names.get(stage) !== name ? "" : name);
  });
  const stages = [...names.keys()].sort((a, b) => a - b);
  return { tickvals: stages, ticktext: stages.map((stage) => plain(`${names.get(stage)} ${stage}`.trim())) };
}

function traces(metrics, stepped) {
  const several = data.runs.length > 1;
  return metrics.flatMap((metric, colour) => data.runs.flatMap((run, number) => {
    const found = Object.hasOwn(run.series, metric) ? run.series[metric] : null;
    if (!found) return [];
    const name = plain(shortName(metric, metrics));
    return [{
      type: "scatter", mode: found.x.length > 200 ? "lines" : "lines+markers", name: several ? `${name} · ${plain(run.name)}` : name,
      x: found.x, y: found.value, connectgaps: false,
      line: { color: LINES[(metrics.length > 1 || !several ? colour : number) % LINES.length], width: colour ? 1.2 : 2, dash: DASHES[number], shape: stepped ? "hv" : "linear" }, marker: { size: 4 },
      text: found.step.map((step, i) => `step ${step}${found.update[i] === null ? "" : `, update ${found.update[i]}`}${stageWords(run, metric, step)}`), hovertemplate: "%{text}: %{y:.5g}<extra></extra>",
    }];
  }));
}

/** Room around values that are all the same, which plotly would show between -1 and 1. */
function around(lines) {
  const known = lines.flatMap((line) => line.y).filter((y) => y !== null);
  const low = known.reduce((a, b) => Math.min(a, b), Infinity), high = known.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!known.length || low !== high) return undefined;
  return low === 0 ? [-0.05, 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
}

function draw(id, metrics, stepped) {
  const lines = traces(metrics, stepped), settings = layout(), range = around(lines);
  settings.yaxis = { ...settings.yaxis, ...stageTicks(metrics), ...(range && { range }) };
  return Plotly.react(byId(id), lines, settings, { displayModeBar: false, responsive: true });
}

function drawAll() {
  data.charts.forEach((chart, number) => draw(`chart-${number}`, chart.metrics, chart.stepped));
  if (byId("metric").value) draw("any", [byId("metric").value], false);
}

const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.series)))].sort();
byId("metric").replaceChildren(...names.map((name) => {
  const option = document.createElement("option");
  option.value = name;
  option.textContent = name;
  return option;
}));
byId("metric").addEventListener("change", drawAll);

const system = matchMedia("(prefers-color-scheme: dark)");
function theme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  document.documentElement.style.colorScheme = dark ? "dark" : "light";
  drawAll();
}
system.addEventListener("change", (event) => theme(event.matches));
byId("theme").addEventListener("click", () => theme(!document.documentElement.classList.contains("dark")));
theme(system.matches);
