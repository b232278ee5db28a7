// Charts of lines. A series has a name, a colour, x and v; some have a band (low, high), are thin or stepped.
const HEIGHT = 210;

function lineChart(holder, chart) {
  holder.replaceChildren();
  const named = chart.series.filter((one) => !one.thin && one.name);
  if (named.length > 1) holder.appendChild(legend(named));
  const width = holder.clientWidth;
  const finite = (list) => list.filter((value) => value !== null);
  const ys = chart.series.flatMap((one) => finite(one.v).concat(finite(one.low || []), finite(one.high || [])));
  const xs = chart.series.flatMap((one) => [one.x[0], one.x[one.x.length - 1]]).concat(0, chart.end || 0);
  if (!ys.length) { holder.append("no finite value was recorded"); return; }
  let [low, high] = extent(ys), [left, right] = extent(xs);
  if (chart.zero) low = Math.min(0, low);
  if (low === high) { const room = Math.abs(low) * 0.1 || 1; low -= chart.zero && low === 0 ? 0 : room; high += room; }
  else { const room = (high - low) * 0.06; high += room; if (!chart.zero) low -= room; }
  if (left === right) { left -= 0.5; right += 0.5; }
  const marks = ticks(low, high, 4), digits = digitsOf(marks), labels = marks.map((mark) => chart.format(mark, digits));
  const box = { left: 14 + 6.3 * Math.max(...labels.map((label) => label.length)), right: width - 10, top: 8, bottom: HEIGHT - 24 };
  const x = (value) => box.left + (value - left) / (right - left) * (box.right - box.left);
  const y = (value) => box.bottom - (value - low) / (high - low) * (box.bottom - box.top);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": chart.label }, holder);
  marks.forEach((mark, n) => {
    draw("line", { class: "gridline", x1: box.left, x2: box.right, y1: y(mark), y2: y(mark) }, svg);
    draw("text", { x: box.left - 6, y: y(mark) + 4, "text-anchor": "end" }, svg, labels[n]);
  });
  xAxis(svg, box, x, left, right, chart.axis);
  for (const one of chart.series) drawSeries(svg, one, x, y);
  hover(svg, box, x, y, named.length ? named : chart.series, chart, (px) => left + (px - box.left) / (box.right - box.left) * (right - left));
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  return [low, high];
}

function legend(series) {
  const list = document.createElement("ul");
  list.className = "legend";
  for (const one of series) {
    const item = document.createElement("li"), square = document.createElement("i");
    square.style.background = `var(--c${one.color % 8})`;
    item.append(square, one.name);
    list.appendChild(item);
  }
  return list;
}

function xAxis(svg, box, x, left, right, axis) {
  const words = axis === "t" ? seconds : short;
  draw("line", { class: "axisline", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }, svg);
  const marks = ticks(left, right, Math.max(2, Math.floor((box.right - box.left) / 70)), axis === "step");
  const digits = digitsOf(marks);
  for (const mark of marks) {
    const anchor = x(mark) > box.right - 18 ? "end" : "middle";
    draw("text", { x: x(mark), y: box.bottom + 17, "text-anchor": anchor }, svg, words(mark, digits) + (axis === "step" && mark === marks[marks.length - 1] ? " steps" : ""));
    draw("line", { class: "axisline", x1: x(mark), x2: x(mark), y1: box.bottom, y2: box.bottom + 4 }, svg);
  }
}

function drawSeries(svg, one, x, y) {
  const color = `var(--c${one.color % 8})`;
  if (one.low) {
    const upper = one.x.map((at, n) => `${x(at).toFixed(1)} ${y(one.high[n]).toFixed(1)}`);
    const lower = one.x.map((at, n) => `${x(at).toFixed(1)} ${y(one.low[n]).toFixed(1)}`).reverse();
    draw("path", { class: "band", d: `M${upper.concat(lower).join("L")}Z`, style: `fill:${color}` }, svg);
  }
  let path = "", pen = false;
  one.x.forEach((at, n) => {
    if (one.v[n] === null) { pen = false; return; }
    const px = x(at).toFixed(1), py = y(one.v[n]).toFixed(1);
    path += !pen ? `M${px} ${py}` : one.stepped ? `H${px}V${py}` : `L${px} ${py}`;
    pen = true;
  });
  draw("path", { class: one.thin ? "line thin" : "line", d: path, style: `stroke:${color}${one.dashed ? ";stroke-dasharray:6 5" : ""}` }, svg);
  if (one.x.length <= 25 && !one.thin) one.x.forEach((at, n) => {
    if (one.v[n] !== null) draw("circle", { cx: x(at), cy: y(one.v[n]), r: 2.6, style: `fill:${color}` }, svg);
  });
}

function hover(svg, box, x, y, series, chart, valueAt) {
  const cross = draw("line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" }, svg);
  svg.addEventListener("pointermove", (event) => {
    const px = event.clientX - svg.getBoundingClientRect().left;
    if (px < box.left - 8 || px > box.right + 8) { hideTip(); cross.setAttribute("visibility", "hidden"); return; }
    const at = valueAt(px), rows = [];
    let head = at;
    for (const one of series.slice(0, 12)) {
      const n = nearest(one.x, at), value = one.v[n];
      head = one.x[n];
      const spread = one.low ? ` ± ${chart.format(one.high[n] - value)}` : "";
      rows.push(`${series.length > 1 ? one.name + ": " : ""}${value === null ? "not finite" : chart.format(value) + spread}`);
    }
    cross.setAttribute("x1", x(head)); cross.setAttribute("x2", x(head)); cross.setAttribute("visibility", "visible");
    showTip(event, [chart.axis === "t" ? seconds(head) : `step ${Math.round(head)}`, ...rows].join("\n"));
  });
  svg.addEventListener("pointerleave", () => { hideTip(); cross.setAttribute("visibility", "hidden"); });
}
