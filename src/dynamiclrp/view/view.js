// Draws a page of relevance from the data inside it: tokens, pictures, sounds, tables, generations. No network, no library.
(() => {
  "use strict";
  const page = JSON.parse(document.getElementById("dlrp-data").textContent);
  const $ = (id) => document.getElementById(id);
  const redraws = [];
  const redraw = () => redraws.forEach((f) => f());

  // ---- values ----

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

  // ---- tip and switches ----

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

  // ---- tokens ----

  // Special tokens, padding, and a first token that outweighs all others are shown on their own: a scale made by them
  // would leave everything else pale. (The same rule as `sinks` in attribution.py.)
  const setApart = (kinds, values) => {
    const apart = kinds.map((kind) => kind === "special" || kind === "padding");
    const first = kinds.indexOf("first");
    if (first >= 0 && first < values.length) {
      const rest = largest(values.filter((_, i) => i !== first && !apart[i]));
      if (Math.abs(values[first]) > 1.5 * rest) apart[first] = true;
    }
    return apart;
  };
  const units = (input, words) => {
    const starts = words ? input.words : input.pieces.map((_, i) => i);
    return starts.map((start, k) => {
      const stop = k + 1 < starts.length ? starts[k + 1] : input.pieces.length;
      let value = 0;
      for (let i = start; i < stop; i++) value += input.values[i];
      return { text: input.pieces.slice(start, stop).join(""), kind: input.kinds[start], value, start };
    });
  };
  const strip = (shown, apart, all, most = 4) => {
    const total = all.reduce((sum, v) => sum + Math.abs(v), 0);
    const own = shown.filter((_, i) => apart[i]);
    if (!own.length || !total) return null;
    const share = own.reduce((sum, u) => sum + Math.abs(u.value), 0) / total;
    const top = [...own].sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, most);
    const names = top.map((u) => element("span", {}, element("b", {}, visible(u.text)), ` ${signed(u.value)}`));
    const what = own.every((u) => u.kind === "first") ? "The first token holds" : own.some((u) => u.kind === "first") ? "Special and first tokens hold" : own.length > 1 ? "Special tokens hold" : "A special token holds";
    return element("div", { class: "apart-strip" }, element("span", {}, `${what} ${percent(share)} of all relevance`),
      element("span", { class: "gauge", style: { "--share": share.toFixed(4) } }), ...names,
      ...(own.length > top.length ? [element("span", {}, `and ${own.length - top.length} more`)] : []));
  };
  // the text's own direction, whatever its special tokens are written in
  const direction = (input) => {
    const letter = input.pieces.filter((_, i) => input.kinds[i] !== "special").join("").match(/\p{L}/u);
    return letter && /[\u0590-\u08ff\ufb1d-\ufefc]/.test(letter[0]) ? "rtl" : "ltr";
  };
  let words = false;
  const drawTokens = (host, input) => {
    host.textContent = "";
    const shown = units(input, words).filter((u) => u.kind !== "padding" || u.value !== 0);
    const values = shown.map((u) => u.value);
    const apart = setApart(shown.map((u) => u.kind), values);
    const full = largest(values.filter((_, i) => !apart[i])) || largest(values) || 1;
    const total = values.reduce((sum, v) => sum + Math.abs(v), 0) || 1;
    const long = shown.length > 160;
    const line = element("p", { class: `line ${long ? "small" : "large"}`, dir: direction(input) });
    let word = null;
    const spans = [];
    shown.forEach((u, i) => {
      const strength = Math.min(1, Math.abs(u.value) / full);
      const text = `${visible(u.text)}  ${signed(u.value)}  (${percent(Math.abs(u.value) / total)})`;
      const span = element("span", {
        class: `token ${side(u.value)}${apart[i] ? " apart" : ""}`, tabindex: 0, style: { "--a": strength.toFixed(3) },
        "data-value": u.value, "data-index": u.start, "aria-label": text,
        onmouseenter: () => above(span, text), onmouseleave: hush, onfocus: () => above(span, text), onblur: hush,
      }, element("b", {}, long ? flowing(u.text) : visible(u.text)), element("i", {}, brief(u.value, full)));
      spans.push(span);
      if (long) { line.append(span); return; }
      // the space before a word belongs to its token: it begins a new word, the other pieces stay together
      if (!word || /^\s/.test(u.text) || apart[i] || (i && apart[i - 1])) {
        if (word) line.append(" ");
        word = element("span", { class: "word" });
        line.append(word);
      }
      word.append(span);
    });
    host.append(line);
    const own = strip(shown, apart, values);
    if (own) host.append(own);
    if (shown.length > 60) {  // too many to find the strong ones by eye
      const entries = shown.map((u, i) => ({ name: visible(u.text), value: u.value, span: spans[i] })).filter((_, i) => !apart[i]);
      host.append(bars(strongest(entries), "strongest"));
    }
  };

  // ---- pictures ----

  let patch = 1, together = false, sides = "both";
  const maps = [];
  const paint = (canvas, rows, columns, values, full) => {
    canvas.width = columns;
    canvas.height = rows;
    const context = canvas.getContext("2d"), pixels = context.createImageData(columns, rows);
    const pos = hue("--pos"), neg = hue("--neg");
    for (let i = 0; i < values.length; i++) {
      const strength = Math.min(1, Math.abs(values[i]) / full), colour = values[i] >= 0 ? pos : neg;
      const at = 4 * i;
      pixels.data[at] = colour[0];
      pixels.data[at + 1] = colour[1];
      pixels.data[at + 2] = colour[2];
      // a square root would shout about noise, a straight line would hide the middle: 0.8 reads best over a photo
      pixels.data[at + 3] = 255 * strength ** 0.8;
    }
    context.putImageData(pixels, 0, 0);
  };
  const pooled = (map, size) => {
    if (size === 1) return map;
    const rows = Math.ceil(map.rows / size), columns = Math.ceil(map.columns / size), values = new Float32Array(rows * columns);
    for (let y = 0; y < map.rows; y++) {
      for (let x = 0; x < map.columns; x++) values[Math.floor(y / size) * columns + Math.floor(x / size)] += map.values[y * map.columns + x];
    }
    return { rows, columns, values };
  };
  const drawImage = (host, input) => {
    const map = unpack(input.map), canvas = element("canvas", { role: "img", "aria-label": `relevance of ${input.name}` });
    const [left, top, right, bottom] = input.seen;
    const part = element("div", { class: "seen", style: {
      left: `${100 * left / input.width}%`, top: `${100 * top / input.height}%`,
      width: `${100 * (right - left) / input.width}%`, height: `${100 * (bottom - top) / input.height}%`,
    } }, canvas);
    const stack = element("div", { class: "stack", style: { "aspect-ratio": `${input.width} / ${input.height}` } });
    if (input.picture !== null) stack.append(element("img", { src: page.pictures[input.picture], alt: "" }));
    stack.append(part);
    const slack = 0.015 * Math.max(input.width, input.height);
    const whole = left <= slack && top <= slack && right >= input.width - slack && bottom >= input.height - slack;
    host.append(stack);
    if (!whole && !maps.length) ($("original") ? $("original").closest(".panel") : host).append(element("p", { class: "caption" }, "Only the clear part was shown to the model."));
    let shown = map;
    maps.push(map);
    canvas.addEventListener("mousemove", (event) => {
      const box = canvas.getBoundingClientRect();
      const x = Math.floor((event.clientX - box.left) / box.width * map.columns), y = Math.floor((event.clientY - box.top) / box.height * map.rows);
      const value = shown.values[Math.min(shown.rows - 1, Math.floor(y / patch)) * shown.columns + Math.min(shown.columns - 1, Math.floor(x / patch))];
      say(`${patch > 1 ? `${patch} × ${patch} pixels` : "pixel"} at ${x}, ${y}   ${signed(value)}`, event.clientX, event.clientY);
    });
    canvas.addEventListener("mouseleave", hush);
    const draw = () => {
      shown = pooled(map, patch);
      const full = together ? Math.max(...maps.map((m) => quantile(pooled(m, patch).values, 0.995))) : quantile(shown.values, 0.995);
      canvas.classList.toggle("blocks", patch > 2);
      // patches at the edge may be cut: the canvas is as large as the patches, not as the map
      canvas.style.width = `${100 * shown.columns * patch / map.columns}%`;
      canvas.style.height = `${100 * shown.rows * patch / map.rows}%`;
      const kept = sides === "both" ? shown.values : shown.values.map((v) => ((v > 0) === (sides === "for") ? v : 0));
      paint(canvas, shown.rows, shown.columns, kept, full);
    };
    redraws.push(draw);
  };

  // ---- sounds ----

  const drawSound = (host, input) => {
    const wave = element("canvas", { class: "sound-canvas wave", role: "img", "aria-label": "waveform, coloured by relevance" });
    const spectrum = element("canvas", { role: "img", "aria-label": "spectrogram with relevance" });
    const [begin, end] = input.span, seconds = input.seconds;
    Object.assign(spectrum.style, { left: `${100 * begin / seconds}%`, width: `${100 * (end - begin) / seconds}%` });
    host.append(wave, element("div", { class: "sound-canvas spectrum" }, spectrum),
      element("div", { class: "seconds" }, element("span", {}, "0 s"), element("span", {}, `${seconds.toFixed(2)} s`)));
    if (input.audio) host.append(element("audio", { controls: "", src: input.audio }));
    const values = input.values, heat = input.map ? unpack(input.map) : null;
    const shade = bytes(input.spectrogram.data), [bands, frames] = input.spectrogram.shape, bins = input.low.length;
    const full = quantile(values, 0.995), heatFull = heat ? quantile(heat.values, 0.995) : full;
    const loud = Math.max(largest(input.low), largest(input.high)) || 1;
    // which value stands at a moment; nothing where the model was given nothing
    const at = (time) => { const k = Math.floor((time - begin) / (end - begin) * values.length); return k >= 0 && k < values.length ? values[k] : 0; };
    const beyond = values.filter((_, k) => { const t = begin + (k + 0.5) * (end - begin) / values.length; return t < 0 || t > seconds; });
    const total = values.reduce((sum, v) => sum + Math.abs(v), 0);
    const lost = beyond.reduce((sum, v) => sum + Math.abs(v), 0);
    if (end < 0.97 * seconds) host.append(element("p", { class: "caption" }, `The model was given the first ${end.toFixed(2)} s only.`));
    else if (end > 1.03 * seconds) host.append(element("p", { class: "caption" }, `The model was also given ${(end - seconds).toFixed(2)} s of silence after the end; it holds ${percent(lost / (total || 1))} of all relevance.`));
    const draw = () => {
      const context = wave.getContext("2d"), pos = hue("--pos"), neg = hue("--neg"), glow = hue("--glow");
      wave.width = Math.max(bins, 900);
      wave.height = 224;
      const step = wave.width / bins, middle = wave.height / 2;
      for (let i = 0; i < bins; i++) {
        const v = at((i + 0.5) / bins * seconds), c = (v >= 0 ? pos : neg).join(" "), a = Math.min(1, Math.abs(v) / full) ** 0.8;
        const y = middle - input.high[i] / loud * middle * 0.92, h = Math.max(2, (input.high[i] - input.low[i]) / loud * middle * 0.92);
        [[`rgb(${c} / ${0.28 * a})`, 0, wave.height], [`rgb(${glow.join(" ")} / 0.32)`, y, h], [`rgb(${c} / ${a})`, y, h]].forEach(([fill, top, height]) => {
          context.fillStyle = fill;
          context.fillRect(i * step, top, step + 0.6, height);
        });
      }
      spectrum.width = frames;
      spectrum.height = bands;
      const pixels = new ImageData(frames, bands);
      for (let f = 0; f < bands; f++) {
        for (let t = 0; t < frames; t++) {
          const place = 4 * ((bands - 1 - f) * frames + t), dark = shade[f * frames + t] / 255 * 0.6;
          const v = heat ? heat.values[Math.floor(f * heat.rows / bands) * heat.columns + Math.floor(t * heat.columns / frames)] : values[Math.floor(t * values.length / frames)];
          const c = v >= 0 ? pos : neg, a = Math.min(1, Math.abs(v) / heatFull) ** 0.8 * (heat ? 0.9 : 0.25 + dark);
          const alpha = a + dark * (1 - a);
          for (let k = 0; k < 3; k++) pixels.data[place + k] = alpha ? (c[k] * a + glow[k] * dark * (1 - a)) / alpha : 0;
          pixels.data[place + 3] = 255 * alpha;
        }
      }
      spectrum.getContext("2d").putImageData(pixels, 0, 0);
    };
    wave.addEventListener("mousemove", (event) => {
      const box = wave.getBoundingClientRect(), time = (event.clientX - box.left) / box.width * seconds;
      say(`${time.toFixed(2)} s   ${signed(at(time))}`, event.clientX, event.clientY);
    });
    wave.addEventListener("mouseleave", hush);
    redraws.push(draw);
  };

  // ---- signed bars ----

  // a name in a list that leads to where it stands in the text
  const jump = (name, span) => element("button", { type: "button", class: "jump", onclick: () => {
    span.scrollIntoView({ block: "center", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    span.classList.add("found");
    setTimeout(() => span.classList.remove("found"), 1600);
  } }, name);
  const strongest = (entries, most = 10) => entries.filter((e) => e.value).sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, most);
  const bars = (rows, style = "") => {
    const low = Math.min(0, ...rows.map((r) => r.value)), high = Math.max(0, ...rows.map((r) => r.value)), width = high - low || 1;
    const zero = 100 * -low / width, cells = rows.some((r) => r.cell);
    const table = element("table", { class: `signed ${style}`.trim(), style: { "--zero": `${zero}%` } });
    rows.forEach((r) => {
      const from = 100 * (Math.min(0, r.value) - low) / width;
      const bar = element("span", { class: `bar ${side(r.value)}`, style: { left: `${from}%`, width: `${100 * Math.abs(r.value) / width}%` } });
      table.append(element("tr", { "data-value": r.value }, element("th", { scope: "row", title: r.title || r.name }, r.span ? jump(r.name, r.span) : r.name),
        ...(cells ? [element("td", { class: "cell" }, r.cell || "")] : []),
        element("td", { class: "track" }, bar), element("td", { class: "value" }, signed(r.value))));
    });
    return table;
  };
  const drawTable = (host, input) => {
    const rows = input.columns.map((name, i) => ({ name, cell: input.cells[i], value: input.values[i] }))
      .sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
    const few = 20;
    host.append(bars(rows.slice(0, few)));
    if (rows.length > few) {
      const more = element("button", { type: "button", class: "more" }, `all ${rows.length}`);
      more.addEventListener("click", () => { host.replaceChildren(bars(rows), ...(rest ? [rest] : [])); });
      host.append(more);
    }
    const rest = input.rest !== null && input.rest !== undefined ? element("p", { class: "caption" }, `The largest ${rows.length}; all others together ${signed(input.rest)}.`) : null;
    if (rest) host.append(rest);
  };

  // ---- generation ----

  const drawGeneration = (g) => {
    const matrix = unpack(g.matrix), columns = matrix.columns, count = g.generated.length;
    const reach = (i) => g.start + i;
    const own = (j) => (j < g.start ? g.kinds[j] : g.said[j - g.start]) === "special";
    const row = (i) => matrix.values.subarray(i * columns, i * columns + reach(i));
    const context = $("context"), generated = $("generated"), chosen = $("chosen");
    let scale = "token", held = null;
    // begin at a token that says something: the longest
    const says = (i) => (g.said[i] === "special" ? 0 : g.generated[i].trim().length);
    const first = g.generated.reduce((best, _, i) => (says(i) > says(best) ? i : best), 0);
    let over = { row: first };
    const all = largest(Array.from({ length: count }, (_, i) => {
      const values = Array.from(row(i)), apart = setApart(g.kinds.slice(0, reach(i)), values);
      return largest(values.filter((_, j) => !apart[j]));
    })) || 1;

    const spans = [];
    const token = (piece, kind, index) => {
      const step = index - g.start;
      const span = element("span", { class: `token${kind === "special" ? " apart" : ""}`, "data-index": index }, flowing(piece));
      if (step >= 0) {
        span.id = `t${step}`;
        span.setAttribute("role", "option");
        span.setAttribute("aria-selected", "false");
        span.tabIndex = step === first ? 0 : -1;
      }
      spans.push(span);
      return span;
    };
    g.pieces.slice(0, g.start).forEach((piece, i) => context.append(token(piece, g.kinds[i], i)));
    g.generated.forEach((piece, i) => generated.append(token(piece, g.said[i], g.start + i)));
    context.dir = generated.dir = direction(g);
    if (g.start > 400) context.classList.add("long");
    if (count > 400) generated.classList.add("long");

    const colour = (span, value, full) => {
      const strength = full ? Math.min(1, Math.abs(value) / full) : 0;
      span.classList.toggle("for", value > 0 && strength > 0.004);
      span.classList.toggle("against", value < 0 && strength > 0.004);
      span.style.setProperty("--a", strength.toFixed(3));
    };
    const list = (entries, name) => {
      const top = strongest(entries).map((e) => ({ name: visible(e.text), title: `${name} ${e.index}`, value: e.value, span: e.span }));
      return top.length ? bars(top) : element("p", { class: "note" }, "nothing");
    };
    // tokens of the context added up to words, where that is asked for
    const grouped = (values, stop) => units({ pieces: g.pieces.slice(0, stop), kinds: g.kinds, values, words: g.words.filter((w) => w < stop) }, words);

    const showRow = (i) => {
      const values = Array.from(row(i)), stop = reach(i), apart = setApart(g.kinds.slice(0, stop), values);
      const shown = grouped(values, stop), marks = setApart(shown.map((u) => u.kind), shown.map((u) => u.value));
      const full = scale === "all" ? all : largest(shown.filter((_, k) => !marks[k]).map((u) => u.value)) || largest(values);
      let k = 0;
      spans.forEach((span, j) => {
        while (k + 1 < shown.length && shown[k + 1].start <= j) k++;
        colour(span, j < stop ? shown[k].value : 0, full);
        span.classList.toggle("apart", j < stop ? apart[j] : own(j));
        span.classList.toggle("later", j > stop);
        span.classList.toggle("chosen", j === stop);
        span.classList.toggle("held", false);
        if (j >= g.start) span.setAttribute("aria-selected", j === stop);
      });
      const total = values.reduce((sum, v) => sum + v, 0);
      const against = g.contrasts.length ? ` rather than “${visible(g.contrasts[i])}”` : "";
      const others = g.alternatives[i].map(([piece, p]) => `${visible(piece)} ${percent(p)}`).join(" · ");
      const aside = strip(shown, marks, shown.map((u) => u.value), 2);
      chosen.replaceChildren(
        element("p", { class: "step" }, `token ${i + 1} of ${count}${held ? ", held" : ""}`),
        element("h2", {}, visible(g.generated[i])),
        element("p", { class: "step" }, `${percent(g.probabilities[i])} · ${g.contrasts.length ? "lead" : "score"} ${number(g.scores[i])}${against} · ${number(total)} of it reached the context`),
        ...(aside ? [aside] : []), list(shown.filter((_, k) => !marks[k]).map((u) => ({ ...u, index: u.start, span: spans[u.start] })), "token"),
        element("p", { class: "others" }, `likeliest here: ${others}`));
    };
    const showColumn = (j) => {
      const led = [];
      for (let i = Math.max(0, j - g.start + 1); i < count; i++) led.push({ text: g.generated[i], index: i, value: matrix.values[i * columns + j], span: spans[g.start + i] });
      const full = scale === "all" ? all : largest(led.map((e) => e.value)) || 1;
      const values = new Map(led.map((e) => [g.start + e.index, e.value]));
      spans.forEach((span, k) => {
        colour(span, values.get(k) || 0, full);
        span.classList.toggle("later", false);
        span.classList.toggle("apart", own(k));
        span.classList.toggle("chosen", k === j);
        span.classList.toggle("held", false);
      });
      chosen.replaceChildren(
        element("p", { class: "step" }, `token ${j + 1} of the context${held ? ", held" : ""}: what it led to`),
        element("h2", {}, visible(g.pieces[j])), list(led, "generated token"));
    };

    // The matrix: a pixel per cell on a canvas, labels where there is room for them, a frame around what is chosen.
    const plate = $("matrix"), canvas = plate.querySelector("canvas"), frame = element("div", { class: "frame" });
    const labelled = columns <= 110 && count <= 90;
    const labels = element("div", { class: "labels", "aria-hidden": "true" });
    const rowLabels = [], columnLabels = [];
    plate.append(labels, frame);
    if (labelled) {
      g.generated.forEach((piece) => rowLabels.push(element("span", { class: "row-label" }, visible(piece))));
      g.pieces.forEach((piece) => columnLabels.push(element("span", { class: "column-label" }, visible(piece))));
      labels.append(...rowLabels, ...columnLabels);
    }
    let cell = { x: 1, y: 1, left: 0, top: 0 };
    const size = () => {
      const left = labelled ? 104 : 0, top = labelled ? 96 : 0, wide = (plate.clientWidth || 900) - left - 4;
      const x = labelled ? Math.max(11, Math.min(26, wide / columns)) : Math.max(0.5, wide / columns);
      const y = labelled ? Math.max(13, Math.min(22, x)) : Math.max(1.5, Math.min(6, 620 / count));
      cell = { x, y, left, top };
      Object.assign(canvas.style, { width: `${columns * x}px`, height: `${count * y}px`, marginLeft: `${left}px`, marginTop: `${top}px` });
      rowLabels.forEach((label, i) => Object.assign(label.style, { top: `${top + i * y}px`, width: `${left - 8}px`, lineHeight: `${y}px` }));
      columnLabels.forEach((label, j) => Object.assign(label.style, { left: `${left + j * x}px`, width: `${x}px`, height: `${top - 6}px`, lineHeight: `${x}px` }));
    };
    const paintMatrix = () => {
      const values = new Float32Array(count * columns);
      for (let i = 0; i < count; i++) {
        const line = Array.from(row(i)), apart = setApart(g.kinds.slice(0, reach(i)), line);
        const full = scale === "all" ? all : largest(line.filter((_, j) => !apart[j])) || 1;
        line.forEach((v, j) => { values[i * columns + j] = v / full; });
      }
      paint(canvas, count, columns, values, 1);
    };
    const mark = () => {
      const { x, y, left, top } = cell;
      const begin = over.row === undefined ? Math.max(0, over.column - g.start + 1) : over.row;
      const box = over.row === undefined ? [left + over.column * x, top + begin * y, x, (count - begin) * y] : [left, top + begin * y, reach(begin) * x, y];
      ["left", "top", "width", "height"].forEach((name, k) => { frame.style[name] = `${box[k]}px`; });
      rowLabels.forEach((label, i) => label.classList.toggle("on", i === over.row));
      columnLabels.forEach((label, j) => label.classList.toggle("on", j === over.column));
    };
    const show = (what) => {
      over = what;
      if (what.row !== undefined) showRow(what.row); else showColumn(what.column);
      mark();
    };
    const choose = (index, hold) => {
      const what = index >= g.start ? { row: index - g.start } : { column: index };
      if (hold) held = held && held.row === what.row && held.column === what.column ? null : what;
      show(held || what);
    };
    [context, generated].forEach((host) => {
      host.addEventListener("mouseover", (event) => {
        const span = event.target.closest(".token");
        if (!span) return;
        const index = Number(span.dataset.index);
        if (!held && index >= g.start) choose(index, false);
        const at = held || over;
        const value = at.row !== undefined ? (index < reach(at.row) ? matrix.values[at.row * columns + index] : null) : (index > at.column && index >= g.start ? matrix.values[(index - g.start) * columns + at.column] : null);
        if (value !== null && value !== undefined) above(span, `${visible(span.textContent)}  ${signed(value)}`); else hush();
      });
      host.addEventListener("mouseout", hush);
      host.addEventListener("click", (event) => {
        const span = event.target.closest(".token");
        if (span) choose(Number(span.dataset.index), true);
      });
    });
    generated.addEventListener("keydown", (event) => {
      const i = over.row ?? 0;
      const to = { ArrowRight: i + 1, ArrowDown: i + 1, ArrowLeft: i - 1, ArrowUp: i - 1, Home: 0, End: count - 1, PageDown: i + 10, PageUp: i - 10 }[event.key];
      if (event.key === "Enter" || event.key === " ") { choose(reach(i), true); event.preventDefault(); }
      if (event.key === "Escape") { held = null; show({ row: i }); }
      if (to === undefined) return;
      event.preventDefault();
      held = null;
      const next = Math.min(count - 1, Math.max(0, to));
      show({ row: next });
      spans.forEach((span, k) => { if (k >= g.start) span.tabIndex = k === reach(next) ? 0 : -1; });
      spans[reach(next)].focus();
    });
    generated.addEventListener("focusin", (event) => {
      const span = event.target.closest(".token");
      if (span && !held) show({ row: Number(span.dataset.index) - g.start });
    });
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return { i: Math.min(count - 1, Math.floor((event.clientY - box.top) / box.height * count)), j: Math.min(columns - 1, Math.floor((event.clientX - box.left) / box.width * columns)) };
    };
    canvas.addEventListener("mousemove", (event) => {
      const { i, j } = at(event);
      if (i < 0 || j < 0) return;
      if (!held) show({ row: i });
      say(j < reach(i) ? `${visible(g.generated[i])} ← ${visible(g.pieces[j])}   ${signed(matrix.values[i * columns + j])}` : `${visible(g.generated[i])}: not yet read`, event.clientX, event.clientY);
    });
    canvas.addEventListener("mouseleave", hush);
    canvas.addEventListener("click", (event) => choose(reach(at(event).i), true));
    canvas.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
      event.preventDefault();
      held = null;
      show({ row: Math.min(count - 1, Math.max(0, (over.row ?? 0) + (event.key === "ArrowDown" ? 1 : -1))) });
    });
    either("scale", [["token", "each token’s own scale"], ["all", "one scale"]], "token", (value) => { scale = value; });
    addEventListener("resize", () => { size(); mark(); });
    redraws.push(() => { size(); paintMatrix(); show(held || over); });
  };

  // ---- go ----

  const has = (kind) => page.panels.some((p) => p.inputs.some((i) => i.kind === kind));
  if (has("tokens") || page.generation) {
    either("units", [["tokens", "tokens"], ["words", "words"]], "tokens", (value) => { words = value === "words"; });
  }
  if (has("image")) {
    const root = document.documentElement;
    if (page.pictures.length) either("photo", [["gray", "gray photo"], ["colour", "colour"], ["none", "none"]], "gray", (value) => { root.dataset.under = value; });
    either("sign", [["both", "for and against"], ["for", "for"], ["against", "against"]], "both", (value) => { sides = value; });
    slider("heat", 0, 1, 0.01, 1, (value) => root.style.setProperty("--heat", value));
    slider("patch", 0, 5, 1, 0, (value) => { patch = 2 ** value; redraw(); }, (value) => `${2 ** value} px`);
    if (page.panels.length > 1) either("scale", [["own", "each its own scale"], ["one", "one scale"]], "own", (value) => { together = value === "one"; });
  }
  document.querySelectorAll(".figure").forEach((host) => {
    const input = page.panels[host.dataset.panel].inputs[host.dataset.input];
    if (input.kind === "tokens") redraws.push(() => drawTokens(host, input));
    if (input.kind === "image") drawImage(host, input);
    if (input.kind === "sound") drawSound(host, input);
    if (input.kind === "table") drawTable(host, input);
  });
  if ($("original")) $("original").src = page.pictures[0];
  if (page.generation) drawGeneration(page.generation);
  $("palette").addEventListener("change", (event) => {
    document.documentElement.dataset.palette = event.target.value;
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  try {  // inside a notebook: its theme, not the system's
    const outer = parent !== self ? parent.document.body : null;
    const light = outer && (outer.dataset.jpThemeLight ?? (outer.className.includes("vscode-dark") ? "false" : outer.className.includes("vscode-light") ? "true" : null));
    if (light) document.documentElement.dataset.theme = light === "true" ? "light" : "dark";
  } catch { /* a frame of another origin tells nothing */ }
  redraw();
})();
