// What every part of a page uses: its data, numbers and colours, elements, the tip, switches.
const page = JSON.parse(document.getElementById("dlrp-data").textContent);
const $ = (id) => document.getElementById(id);
let together = false;  // one scale for all panels
const redraws = [];
const redraw = () => redraws.forEach((f) => f());

const number = (v) => {
  if (v === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(v)));
  const text = size < -4 || size > 6 ? v.toExponential(1)
    : v.toLocaleString("en", { minimumFractionDigits: Math.max(0, 2 - size), maximumFractionDigits: Math.max(0, 2 - size) });
  return text.replace("-", "−");
};
const signed = (v) => (v > 0 ? "+" : "") + number(v);
const percent = (p) => p < 0.001 ? "<0.1 %" : 100 * p >= 9.95 ? `${(100 * p).toFixed(0)} %` : `${(100 * p).toFixed(1)} %`;
const brief = (v, full) => {
  const digits = Math.max(0, 1 - Math.floor(Math.log10(full || 1)));
  const text = v.toFixed(Math.min(digits, 8));
  return Number(text) === 0 ? "0" : (v > 0 ? "+" : "") + text.replace("-", "−");
};
const largest = (values) => values.reduce((m, v) => Math.max(m, Math.abs(v)), 0);
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const unpack = (map) => {
  const whole = new Int16Array(bytes(map.data).buffer);
  const values = new Float32Array(whole.length), columns = map.shape[1];
  for (let i = 0; i < whole.length; i++) {
    const root = whole[i] / 32767;
    values[i] = root * Math.abs(root) * map.scales[map.scales.length > 1 ? Math.floor(i / columns) : 0];
  }
  return { rows: map.shape[0], columns, values };
};
const quantile = (values, q) => {
  const sorted = Float32Array.from(values, Math.abs).sort();
  return sorted[Math.max(0, Math.ceil(q * sorted.length) - 1)] || sorted[sorted.length - 1] || 1;
};
const hue = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim().split(" ").map(Number);
const side = (v) => (v > 0 ? "for" : v < 0 ? "against" : "none");
const visible = (piece) => piece.replace(/^ +| +$/g, "").replace(/\n/g, "⏎") || (piece === "" ? "·" : "␣");
const flowing = (piece) => (piece === "" ? "·" : piece.replace(/\n/g, "⏎\n"));

const element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") Object.entries(value).forEach(([k, v]) => made.style.setProperty(k, v));
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
};

// The tip, and switches above the page.

const tip = $("tip");
const say = (text, x, y) => {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(Math.max(6, x - box.width / 2), innerWidth - box.width - 6)}px`;
  tip.style.top = `${y - box.height - 8 < 4 ? y + 18 : y - box.height - 8}px`;
};
const above = (target, text) => {
  const box = target.getBoundingClientRect();
  say(text, box.left + box.width / 2, box.top);
};
const hush = () => { tip.hidden = true; };
addEventListener("scroll", hush, { passive: true, capture: true });

const either = (label, options, chosen, change) => {
  const group = element("span", { class: "either", role: "group", "aria-label": label });
  options.forEach(([value, text]) => {
    const button = element("button", { type: "button", "aria-pressed": value === chosen, "data-value": value }, text);
    button.addEventListener("click", () => {
      group.querySelectorAll("button").forEach((b) => b.setAttribute("aria-pressed", b === button));
      change(value);
      redraw();
    });
    group.append(button);
  });
  $("switches").append(group);
};
const slider = (label, min, max, step, value, change, show) => {
  const output = element("output", {}, show ? show(value) : "");
  const input = element("input", { type: "range", min, max, step, value, "aria-label": label });
  input.addEventListener("input", () => {
    if (show) output.textContent = show(Number(input.value));
    change(Number(input.value));
  });
  $("switches").append(element("label", {}, label, input, output));
};

// A matrix of values on a canvas, a pixel each; `full` is the value of the full colour, one for all or one per row.
const paint = (canvas, rows, columns, values, full) => {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d"), pixels = context.createImageData(columns, rows), bytes = pixels.data;
  const pos = hue("--pos"), neg = hue("--neg");
  for (let y = 0, i = 0; y < rows; y++) {
    const most = typeof full === "number" ? full : full[y];
    for (let x = 0; x < columns; x++, i++) {
      const colour = values[i] >= 0 ? pos : neg, at = 4 * i;
      bytes[at] = colour[0];
      bytes[at + 1] = colour[1];
      bytes[at + 2] = colour[2];
      // a square root would shout about noise, a straight line would hide the middle: 0.8 reads best over a photo
      if (values[i]) bytes[at + 3] = 255 * Math.min(1, Math.abs(values[i]) / most) ** 0.8;
    }
  }
  context.putImageData(pixels, 0, 0);
};
