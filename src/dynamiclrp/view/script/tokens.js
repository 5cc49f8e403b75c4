// Text on its relevance, as tokens or words.
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
// what is shown of an input, and the value that gets the full colour
const standing = (input) => {
  const shown = units(input, words).filter((u) => u.kind !== "padding" || u.value !== 0);
  const values = shown.map((u) => u.value), apart = setApart(shown.map((u) => u.kind), values);
  return { shown, values, apart, largest: largest(values.filter((_, i) => !apart[i])) || largest(values) || 1 };
};
const drawTokens = (host, input) => {
  host.textContent = "";
  const { shown, values, apart, largest: own } = standing(input);
  const full = together ? Math.max(...page.panels.flatMap((p) => p.inputs).filter((i) => i.kind === "tokens").map((i) => standing(i).largest)) : own;
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
  const aside = strip(shown, apart, values);
  if (aside) host.append(aside);
  if (shown.length > 60) {  // too many to find the strong ones by eye
    const entries = shown.map((u, i) => ({ name: visible(u.text), value: u.value, span: spans[i] })).filter((_, i) => !apart[i]);
    host.append(bars(strongest(entries), "strongest"));
  }
};
