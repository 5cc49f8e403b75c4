// Heat maps over pictures.
let patch = 1, sides = "both";
const maps = [];
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
