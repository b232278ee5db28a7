"use strict";
// Elements, numbers and the tip that follows the pointer.
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");

function draw(name, attributes, parent, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.appendChild(element);
  return element;
}

function short(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e4 && size < 1e12) {
    const [unit, letter] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : [1e3, "k"];
    return +(value / unit).toPrecision(4) + letter;
  }
  if (size >= 1e12 || size < 1e-4) return value.toExponential(1).replace("+", "").replace(".0e", "e");
  return String(+value.toPrecision(4));
}

function seconds(value) {
  const size = Math.abs(value);
  if (size >= 3600) return short(value / 3600) + " h";
  if (size >= 300) return short(value / 60) + " min";
  if (size >= 1 || size === 0) return short(value) + " s";
  return size >= 1e-3 ? short(value * 1e3) + " ms" : short(value * 1e6) + " µs";
}

function bytes(value) {
  for (const [size, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (value >= size) return short(+(value / size).toPrecision(3)) + " " + unit;
  return short(+value.toPrecision(3)) + " B";
}

const percent = (value) => short(+(100 * value).toPrecision(3)) + " %";
const rate = (value) => bytes(value) + "/s";

function ticks(low, high, count, whole) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.7) * power;
  if (whole) step = Math.max(1, step);
  const marks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) marks.push(+(n * step).toPrecision(12));
  return marks;
}

function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(innerWidth - box.width - 4, event.clientX + 14)) + "px";
  tip.style.top = (event.clientY + box.height + 24 > innerHeight ? event.clientY - box.height - 12 : event.clientY + 16) + "px";
}

const hideTip = () => { tip.hidden = true; };

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle; else high = middle;
  }
  return high >= 0 && Math.abs(sorted[high] - value) < Math.abs(sorted[low] - value) ? high : low;
}
