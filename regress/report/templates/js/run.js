// Charts of one or two runs. Texts of a run reach the page as text, never as markup.

const data = JSON.parse(byId("data").textContent);

/** The last part of a metric's name, or all of it where two would look alike. */
function shortName(metric, metrics) {
  const last = metric.split("/").slice(1).join("/") || metric;
  return metrics.filter((other) => other.endsWith(`/${last}`)).length > 1 ? metric : last;
}

/** A dotted line where a segment goes on from a checkpoint. */
function resumes() {
  return data.runs.flatMap((run, number) => run.segments.filter((segment) => segment.resumed_from !== null).map((segment) => ({ x: segment.step, color: LINES[number], dash: DASHES[2] })));
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
  return `${name === undefined ? "" : `, ${name}`}${at < 0 ? "" : `, round ${rounds.value[at]}`}`;
}

/** Names of stages as labels of the axis, where all runs give a stage the same one. */
function stageTicks(metrics) {
  if (!metrics.includes(STAGE)) return {};
  const names = new Map();
  for (const run of data.runs) run.series[STAGE]?.value.forEach((stage, i) => {
    const name = stageName(run, run.series[STAGE].step[i]) ?? "";
    if (stage !== null) names.set(stage, names.has(stage) && names.get(stage) !== name ? "" : name);
  });
  return { ticks: [...names.keys()].sort((a, b) => a - b).map((stage) => [stage, `${names.get(stage)} ${stage}`.trim()]) };
}

function linesOf(metrics, stepped) {
  const several = data.runs.length > 1;
  return metrics.flatMap((metric, colour) => data.runs.flatMap((run, number) => {
    const found = Object.hasOwn(run.series, metric) ? run.series[metric] : null;
    if (!found) return [];
    const name = several ? `${shortName(metric, metrics)} · ${run.name}` : shortName(metric, metrics);
    const told = (i) => `${name}\nstep ${found.step[i]}${found.update[i] === null ? "" : `, update ${found.update[i]}`}${stageWords(run, metric, found.step[i])}: ${Number(found.value[i]?.toPrecision(5))}`;
    return [{
      name, stepped, color: LINES[(metrics.length > 1 || !several ? colour : number) % LINES.length], dash: DASHES[2 * number],
      points: found.x.map((x, i) => [x, found.value[i], told(i)]),
    }];
  }));
}

function draw(id, title, metrics, stepped) {
  chart(byId(id), { title, lines: linesOf(metrics, stepped), x: { title: "step" }, y: stageTicks(metrics), limits: resumes() });
}

function drawAll() {
  data.charts.forEach(({ title, metrics, stepped }, number) => draw(`chart-${number}`, title, metrics, stepped));
  draw("any", metric.value, [metric.value], false);
}

const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.series)))].sort();
const metric = element("select", "", { id: "metric" }, ...names.map((name) => element("option", "", { value: name }, name)));
metric.addEventListener("change", drawAll);
byId("any").before(element("form", "filters", {}, element("label", "", {}, element("span", "", {}, "metric"), " ", metric)));
startTheme(drawAll);
drawAll();
