// Signed bars: of a table's columns, of the strongest tokens.
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
