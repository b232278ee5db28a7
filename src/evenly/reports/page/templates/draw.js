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

function short(value, digits = 4) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e4 && size < 1e12) {
    const [unit, letter] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : [1e3, "k"];
    return +(value / unit).toPrecision(digits) + letter;
  }
  if (size >= 1e12 || size < 1e-4) return value.toExponential(1).replace("+", "").replace(".0e", "e");
  return String(+value.toPrecision(digits));
}

function seconds(value, digits = 4) {
  const size = Math.abs(value);
  if (size >= 3600) return short(value / 3600, digits) + " h";
  if (size >= 300) return short(value / 60, digits) + " min";
  if (size >= 1 || size === 0) return short(value, digits) + " s";
  return size >= 1e-3 ? short(value * 1e3, digits) + " ms" : short(value * 1e6, digits) + " µs";
}

function bytes(value, digits = 3) {
  for (const [size, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (value >= size) return short(value / size, digits) + " " + unit;
  return short(value, digits) + " B";
}

const percent = (value, digits = 3) => short(100 * value, digits) + " %";
const rate = (value, digits = 3) => bytes(value, digits) + "/s";

function ticks(low, high, count, whole) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.7) * power;
  if (whole) step = Math.max(1, step);
  const marks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) marks.push(+(n * step).toPrecision(12));
  return marks;
}

// The digits that tell ticks apart.
function digitsOf(marks) {
  if (marks.length < 2) return 4;
  const largest = Math.max(...marks.map(Math.abs));
  return Math.min(12, Math.max(3, Math.ceil(Math.log10(largest / (marks[1] - marks[0]))) + 1));
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
