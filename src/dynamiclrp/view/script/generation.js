// What each generated token stands on: the text, the list beside it, the matrix.
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
  // The value that gets the full colour in each row, by the rule of `setApart`, and in all of them.
  const special = g.kinds.map((kind) => kind === "special" || kind === "padding"), sink = g.kinds.indexOf("first");
  const fulls = Float32Array.from({ length: count }, (_, i) => {
    const values = row(i);
    let most = 0;
    for (let j = 0; j < values.length; j++) if (!special[j] && j !== sink) most = Math.max(most, Math.abs(values[j]));
    const heavy = sink >= 0 && sink < values.length ? Math.abs(values[sink]) : 0;
    return (heavy > 1.5 * most ? most : Math.max(most, heavy)) || 1;
  });
  const all = largest(fulls);

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

  // Thousands of tokens change at a touch: only what is different is written.
  const worn = spans.map(() => ["", ""]);
  const dress = (j, value, full, marks) => {
    const strength = full ? Math.min(1, Math.abs(value) / full) : 0, seen = strength > 0.004;
    const name = `token${seen ? (value > 0 ? " for" : " against") : ""}${marks}`, shade = seen ? strength.toFixed(3) : "0";
    if (worn[j][0] !== name) spans[j].className = worn[j][0] = name;
    if (worn[j][1] !== shade) spans[j].style.setProperty("--a", worn[j][1] = shade);
  };
  let selected = null;
  const select = (span) => {
    if (selected) selected.setAttribute("aria-selected", "false");
    selected = span;
    if (span) span.setAttribute("aria-selected", "true");
  };
  const list = (entries, name) => {
    const top = strongest(entries).map((e) => ({ name: visible(e.text), title: `${name} ${e.index}`, value: e.value, span: e.span }));
    return top.length ? bars(top) : element("p", { class: "note" }, "nothing");
  };
  // tokens of the context added up to words, where that is asked for
  const grouped = (values, stop) => (words ? units({ pieces: g.pieces.slice(0, stop), kinds: g.kinds, values, words: g.words.filter((w) => w < stop) }, true)
    : values.map((value, j) => ({ text: g.pieces[j], kind: g.kinds[j], value, start: j })));

  const showRow = (i) => {
    const values = Array.from(row(i)), stop = reach(i), apart = setApart(g.kinds.slice(0, stop), values);
    const shown = grouped(values, stop), marks = setApart(shown.map((u) => u.kind), shown.map((u) => u.value));
    const full = scale === "all" ? all : largest(shown.filter((_, k) => !marks[k]).map((u) => u.value)) || largest(values);
    let k = 0;
    for (let j = 0; j < spans.length; j++) {
      while (k + 1 < shown.length && shown[k + 1].start <= j) k++;
      const marks = (j < stop ? apart[j] : own(j)) ? " apart" : "";
      dress(j, j < stop ? shown[k].value : 0, full, marks + (j > stop ? " later" : j === stop ? " chosen" : ""));
    }
    select(spans[stop]);
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
    for (let k = 0; k < spans.length; k++) dress(k, values.get(k) || 0, full, (own(k) ? " apart" : "") + (k === j ? " chosen" : ""));
    select(null);
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
  const paintMatrix = () => paint(canvas, count, columns, matrix.values, scale === "all" ? all : fulls);
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
