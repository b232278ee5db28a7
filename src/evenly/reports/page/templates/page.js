// What stands where: charts of each kind, the choice of runs, of the x axis and of the theme.
let axis = "t";

function series(line, color, more) { return { name: line.name, color, x: line[axis], v: line.v, ...more }; }

function chartOf(holder) {
  const { chart, run, index } = holder.dataset, charts = data.runs[run], common = { axis, format: short, end: run === undefined ? 0 : charts.end[axis] };
  if (chart === "compared") {
    const compared = data.compared[index];
    const all = compared.series.flatMap((group) => {
      const mean = group.mean[axis];
      const lines = group.lines.map((line) => series({ ...line, name: group.name }, group.color, { thin: mean !== null }));
      return mean ? [...lines, { name: group.name, color: group.color, ...mean }] : lines;
    });
    return { ...common, label: compared.name, series: all, format: valueFormat(compared.name) };
  }
  if (chart === "logged") return { ...common, label: charts.logged[index].name, series: [series(charts.logged[index], 0)], format: valueFormat(charts.logged[index].name) };
  if (chart === "throughput") return { ...common, label: "samples per second", zero: true, series: charts.throughput.map((line) => series(line, 2)) };
  if (chart === "sent") return { ...common, label: "bytes per second", zero: true, format: rate, series: charts.sent[index].map((line, n) => series(line, n, { dashed: n % 2 === 1 })) }; // equal lines are both seen
  if (chart === "drift") return { ...common, label: "drift", zero: true, format: percent, series: [series(charts.exchanges.drift, 3)] };
  if (chart === "cost") return { ...common, label: "seconds of exchanges", zero: true, format: seconds, series: [series(charts.exchanges.seconds, 1), series(charts.exchanges.waited, 6)] };
  if (chart === "period") return { ...common, label: "period", zero: true, series: charts.period.map((line) => series(line, 4, { stepped: true })) };
  return { ...common, label: "samples of each rank", zero: true, series: charts.batches.map((line, n) => series(line, n, { stepped: true })) };
}

function valueFormat(name) { return /acc/i.test(name) ? percent : short; }

const timelines = new Map();
function redraw(holder) {
  if (!holder.clientWidth) return;
  if (holder.classList.contains("chart")) { lineChart(holder, chartOf(holder)); return; }
  if (!timelines.has(holder)) timelines.set(holder, new Timeline(holder, data.runs[holder.dataset.run].timeline));
  timelines.get(holder).render();
}

const drawn = new Map(); // the width at which each chart was drawn
const watcher = new ResizeObserver((entries) => {
  for (const { target } of entries) if (target.clientWidth && drawn.get(target) !== target.clientWidth) { drawn.set(target, target.clientWidth); redraw(target); }
});
const holders = document.querySelectorAll(".chart, .timeline");
for (const holder of holders) watcher.observe(holder);

document.getElementById("axis").addEventListener("change", (event) => {
  axis = event.target.value;
  for (const holder of document.querySelectorAll(".chart")) redraw(holder);
});
const tabs = document.querySelectorAll(".tabs button");
for (const tab of tabs) tab.addEventListener("click", () => {
  for (const other of tabs) other.setAttribute("aria-pressed", other === tab);
  for (const article of document.querySelectorAll(".run")) article.hidden = article.dataset.run !== tab.dataset.run;
});
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
});
