// The timeline: one lane per rank. Rows that are wide enough are drawn from left to right, others as parts of a column.
const KINDS = ["compute", "averaging", "exchange", "waiting", "other"];
const WORDS = ["computing", "averaging gradients", "exchange", "waiting", "other"];
const ORDER = [4, 0, 3, 1, 2]; // in which the phases of a step come, as far as is known: data, computing, waiting, averaging
const WIDE = 14; // pixels of a row that is drawn from left to right

class Timeline {
  constructor(holder, lanes) {
    this.holder = holder; this.unit = lanes.unit_s; this.end = lanes.end; this.lanes = lanes.lanes;
    this.from = 0; this.to = this.end;
    this.tools = document.createElement("div");
    this.tools.className = "tools";
    for (const [label, title, act] of [
      ["+", "zoom in", () => this.zoom(0.4)], ["−", "zoom out", () => this.zoom(2.5)],
      ["◀", "earlier", () => this.move(-0.4)], ["▶", "later", () => this.move(0.4)], ["all", "show all", () => this.show(0, this.end)],
    ]) {
      const button = document.createElement("button");
      button.type = "button"; button.textContent = label; button.title = title; button.setAttribute("aria-label", title); button.onclick = act;
      this.tools.appendChild(button);
    }
    this.range = document.createElement("span");
    this.tools.appendChild(this.range);
    this.canvas = document.createElement("div");
    holder.replaceChildren(this.tools, this.canvas);
    holder.addEventListener("keydown", (event) => {
      const act = { "+": () => this.zoom(0.4), "-": () => this.zoom(2.5), ArrowLeft: () => this.move(-0.25), ArrowRight: () => this.move(0.25), 0: () => this.show(0, this.end) }[event.key];
      if (act) { act(); event.preventDefault(); }
    });
  }

  zoom(factor) { const middle = (this.from + this.to) / 2, half = (this.to - this.from) / 2 * factor; this.show(middle - half, middle + half); }
  move(part) { const length = this.to - this.from; this.show(this.from + part * length, this.to + part * length); }

  show(from, to) {
    const length = Math.min(this.end, Math.max(20, to - from));
    this.from = Math.max(0, Math.min(this.end - length, from));
    this.to = this.from + length;
    this.render();
  }

  render() {
    const width = this.holder.clientWidth, names = width < 500 ? 46 : 118, lane = 30, gap = 6, top = 4;
    const nodes = new Set(this.lanes.map((one) => one.node)).size;
    const height = top + this.lanes.length * (lane + gap) + 26;
    this.box = { left: names, right: width - 12, top, bottom: height - 26 };
    this.x = (at) => this.box.left + (at - this.from) / (this.to - this.from) * (this.box.right - this.box.left);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "timeline of all ranks" });
    this.lanes.forEach((one, n) => {
      const y = top + n * (lane + gap);
      draw("text", { class: "lane", x: 0, y: y + (names > 50 ? 14 : 19) }, svg, names > 50 ? `rank ${one.rank}` : `r${one.rank}${nodes > 1 ? " n" + one.node : ""}`);
      if (names > 50) draw("text", { x: 0, y: y + 27 }, svg, `node ${one.node}${one.device ? ", " + one.device.slice(0, 10) : ""}`);
      draw("rect", { x: this.box.left, y, width: this.box.right - this.box.left, height: lane, style: "fill:var(--grid)" }, svg);
      this.drawLane(svg, one, y, lane);
    });
    xAxis(svg, this.box, (value) => this.x(value / this.unit), this.from * this.unit, this.to * this.unit, "t");
    this.range.textContent = this.from > 0 || this.to < this.end ? `${seconds(this.from * this.unit)} to ${seconds(this.to * this.unit)}` : matchMedia("(pointer: coarse)").matches ? "" : "drag to zoom";
    this.select(svg);
    this.canvas.replaceChildren(svg);
  }

  visible(one) {
    let first = nearest(one.began, this.from);
    if (first > 0) first -= 1;
    let last = first;
    while (last < one.began.length && one.began[last] < this.to) last++;
    return [first, last];
  }

  phases(one, n) {
    const known = one.phases.map((column) => column[n]);
    return [...known, Math.max(0, one.length[n] - known.reduce((sum, part) => sum + part, 0))];
  }

  drawLane(svg, one, y, lane) {
    const [first, last] = this.visible(one), paths = KINDS.map(() => []);
    const clip = (px) => Math.max(this.box.left, Math.min(this.box.right, px));
    const add = (kind, x1, x2, y1, y2) => { if (x2 - x1 > 0.02 && y2 - y1 > 0.02) paths[kind].push(`M${x1.toFixed(2)} ${y1.toFixed(1)}H${x2.toFixed(2)}V${y2.toFixed(1)}H${x1.toFixed(2)}Z`); };
    let pending = null; // narrow rows that share a column
    const flush = () => {
      if (!pending) return;
      const total = pending.sums.reduce((sum, part) => sum + part, 0) || 1;
      let bottom = y + lane;
      pending.sums.forEach((part, kind) => { const rise = lane * part / total; add(kind, clip(pending.x1), clip(pending.x2), bottom - rise, bottom); bottom -= rise; });
      pending = null;
    };
    for (let n = first; n < last; n++) {
      const begin = this.x(one.began[n]), end = this.x(one.began[n] + one.length[n]);
      if (end < this.box.left || begin > this.box.right) continue;
      const parts = this.phases(one, n);
      if (end - begin >= WIDE && one.steps[n] === 1) {
        flush();
        const total = parts.reduce((sum, part) => sum + part, 0) || 1;
        let at = begin;
        for (const kind of ORDER) { const length = (end - begin) * parts[kind] / total; add(kind, clip(at), clip(at + length), y, y + lane); at += length; }
        draw("line", { x1: clip(begin), x2: clip(begin), y1: y, y2: y + lane, style: "stroke:var(--card);stroke-width:1" }, svg);
        continue;
      }
      if (pending && (begin - pending.x2 > 1 || pending.x2 - pending.x1 >= 1.5)) flush();
      if (!pending) pending = { x1: begin, x2: end, sums: parts };
      else { pending.x2 = end; parts.forEach((part, kind) => { pending.sums[kind] += part; }); }
    }
    flush();
    paths.forEach((path, kind) => { if (path.length) draw("path", { class: `fill-${KINDS[kind]}`, "shape-rendering": "crispEdges", d: path.join("") }, svg); });
  }

  describe(event, svg) {
    const bounds = svg.getBoundingClientRect(), px = event.clientX - bounds.left;
    const lane = this.lanes[Math.floor((event.clientY - bounds.top - this.box.top) / 36)];
    if (!lane || px < this.box.left || px > this.box.right) { hideTip(); return; }
    const at = this.from + (px - this.box.left) / (this.box.right - this.box.left) * (this.to - this.from);
    let n = nearest(lane.began, at);
    if (lane.began[n] > at && n > 0) n -= 1;
    const parts = this.phases(lane, n), total = parts.reduce((sum, part) => sum + part, 0) || 1;
    const last = lane.first[n] + lane.steps[n] - 1;
    const head = `rank ${lane.rank}, node ${lane.node}${lane.host ? " (" + lane.host + ")" : ""}\n${lane.steps[n] > 1 ? `steps ${lane.first[n]} to ${last}` : `step ${last}`}: ${seconds(lane.length[n] * this.unit)} from ${seconds(lane.began[n] * this.unit)}`;
    showTip(event, head + parts.map((part, kind) => part / total >= 0.001 ? `\n${WORDS[kind]}: ${seconds(part * this.unit)}, ${(100 * part / total).toFixed(0)} %` : "").join(""));
  }

  select(svg) {
    let begun = null, mark = null;
    const position = (event) => Math.max(this.box.left, Math.min(this.box.right, event.clientX - svg.getBoundingClientRect().left));
    svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch") { this.describe(event, svg); return; }
      begun = position(event);
      mark = draw("rect", { class: "select", x: begun, y: this.box.top, width: 0, height: this.box.bottom - this.box.top }, svg);
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      if (begun === null) { this.describe(event, svg); return; }
      const now = position(event);
      mark.setAttribute("x", Math.min(begun, now)); mark.setAttribute("width", Math.abs(now - begun));
    });
    svg.addEventListener("pointerup", (event) => {
      if (begun === null) return;
      const ends = [begun, position(event)].sort((a, b) => a - b);
      begun = null; mark.remove();
      const at = (px) => this.from + (px - this.box.left) / (this.box.right - this.box.left) * (this.to - this.from);
      if (ends[1] - ends[0] > 4) this.show(at(ends[0]), at(ends[1]));
    });
    svg.addEventListener("pointerleave", hideTip);
    svg.addEventListener("dblclick", () => this.show(0, this.end));
  }
}
