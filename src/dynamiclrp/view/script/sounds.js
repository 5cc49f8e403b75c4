// Waveforms and spectrograms with relevance.
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
