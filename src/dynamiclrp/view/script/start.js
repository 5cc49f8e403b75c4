// Puts up the switches a page needs, draws everything, and follows colours and themes.
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
}
if (page.panels.length > 1 && (has("tokens") || has("image"))) {
  either("scale", [["own", "each its own scale"], ["one", "one scale"]], "own", (value) => { together = value === "one"; });
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
