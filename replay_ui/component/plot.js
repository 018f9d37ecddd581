// A signal over the steps; a drag zooms the strip, a double click shows all again.
function plotPart(g, root) {
  const box = document.createElement("div");
  box.className = "plot";
  const title = document.createElement("div");
  title.className = "title";
  const canvas = document.createElement("canvas");
  box.append(title, canvas);
  root.append(box);
  const ink = canvas.getContext("2d");
  const left = 30, right = 6, top = 6, bottom = 16;
  let drag = null;

  const range = () => g.zoom ?? [0, Math.max(g.n - 1, 1)];
  // Measured once a drawing: asking the canvas for every point would lay the page out anew each time.
  let size = [0, 0];
  const width = () => size[0] - left - right;
  const height = () => size[1] - top - bottom;
  const x = (p) => left + ((p - range()[0]) / Math.max(range()[1] - range()[0], 1)) * width();
  const at = (event) => {
    const px = event.clientX - canvas.getBoundingClientRect().left;
    const [a, b] = range();
    return Math.round(Math.min(Math.max(a + ((px - left) / width()) * (b - a), a), b));
  };

  function draw() {
    size = [canvas.clientWidth, canvas.clientHeight];
    if (g.version === null || !g.view || !size[0]) return;
    const scale = devicePixelRatio || 1, [w, h] = size;
    canvas.width = w * scale;
    canvas.height = h * scale;
    ink.setTransform(scale, 0, 0, scale, 0, 0);
    const name = g.view.colour === "route" ? "gap" : g.view.colour;
    const values = g.signal[name], [low, high] = extent(g, name), [a, b] = range();
    const y = (v) => top + (1 - Math.min(Math.max((v - low) / (high - low), 0), 1)) * height();
    const css = getComputedStyle(box);
    const text = css.color, line = css.getPropertyValue("--st-border-color") || "#8884";
    ink.font = `11px ${css.fontFamily}`;
    ink.fillStyle = text;
    ink.strokeStyle = line;
    ink.lineWidth = 1;
    for (const v of [low, (low + high) / 2, high]) {
      ink.beginPath();
      ink.moveTo(left, y(v));
      ink.lineTo(w - right, y(v));
      ink.stroke();
      ink.textAlign = "right";
      ink.textBaseline = "middle";
      ink.fillText(v.toFixed(high > 10 ? 0 : high > 1.5 ? 1 : 2), left - 4, y(v));
    }
    ink.textBaseline = "top";
    ink.textAlign = "left";
    ink.fillText(String(g.idx[a] ?? 0), left, h - bottom + 4);
    ink.textAlign = "right";
    ink.fillText(`step ${g.idx[b] ?? 0}`, w - right, h - bottom + 4);

    ink.save();
    ink.beginPath();
    ink.rect(left, 0, width() + right, h - bottom + 2);
    ink.clip();
    const slot = Math.max(width() / Math.max(b - a, 1), 1);
    ink.fillStyle = "rgba(0, 114, 178, .13)";
    for (let p = a; p <= b; p += 1) if (g.tier[p] === 1) ink.fillRect(x(p) - slot / 2, top, slot, height());
    ink.strokeStyle = "#7f9fbf";
    ink.beginPath();
    let open = false;
    for (let p = a; p <= b; p += 1) {
      if (!written(g, p) || Number.isNaN(values[p])) { if (written(g, p)) open = false; continue; }
      if (open) ink.lineTo(x(p), y(values[p]));
      else ink.moveTo(x(p), y(values[p]));
      open = true;
    }
    ink.stroke();
    if (slot > 3) {
      for (let p = a; p <= b; p += 1) {
        if (!written(g, p) || Number.isNaN(values[p])) continue;
        ink.fillStyle = ["#999999", "#0072B2", "#009E73", "#56B4E9", "#56B4E9", "#56B4E9"][g.tier[p]];
        ink.beginPath();
        ink.arc(x(p), y(values[p]), Math.min(slot / 3, 3), 0, 7);
        ink.fill();
      }
    }
    if (name === "gap") {
      const limits = [[g.threshold, [5, 3], text]];
      if (g.view.threshold !== null && g.view.threshold !== undefined) limits.push([null, [2, 2], "#D55E00"]);
      for (const [series, dash, colour] of limits) {
        ink.setLineDash(dash);
        ink.strokeStyle = colour;
        ink.lineWidth = 1.5;
        ink.beginPath();
        if (series) for (let p = a, on = false; p <= b; p += 1) {
          if (Number.isNaN(series[p])) continue;
          if (on) ink.lineTo(x(p), y(series[p]));
          else ink.moveTo(x(p), y(series[p]));
          on = true;
        } else { ink.moveTo(left, y(g.view.threshold)); ink.lineTo(w - right, y(g.view.threshold)); }
        ink.stroke();
        ink.setLineDash([]);
      }
    }
    ink.lineWidth = 2;
    for (let p = a; p <= b; p += 1) {
      const bad = OUTCOMES[g.outcome[p]] === "rejected", guard = g.flags[p] & GUARD;
      if (!bad && !guard) continue;
      const cy = Number.isNaN(values[p]) ? top + height() - 4 : y(values[p]);
      ink.strokeStyle = bad ? "#D55E00" : "#E69F00";
      ink.beginPath();
      ink.moveTo(x(p) - 4, cy - 4); ink.lineTo(x(p) + 4, cy + 4);
      ink.moveTo(x(p) + 4, cy - 4); ink.lineTo(x(p) - 4, cy + 4);
      ink.stroke();
    }
    ink.strokeStyle = text;
    ink.lineWidth = 1;
    ink.beginPath();
    ink.moveTo(x(g.pos), top);
    ink.lineTo(x(g.pos), top + height());
    ink.stroke();
    if (drag && drag.to !== drag.from) {
      ink.fillStyle = "rgba(0, 114, 178, .25)";
      const from = x(Math.min(drag.from, drag.to)), to = x(Math.max(drag.from, drag.to));
      ink.fillRect(from, top, to - from, height());
    }
    ink.restore();
    const mark = name === "gap" ? " · dashed: threshold" : "";
    title.textContent = `${name} over steps · blue: large${mark} · ✕ rejected · drag to zoom${g.zoom ? ", double-click for all" : ""}`;
  }

  canvas.addEventListener("pointerdown", (event) => {
    drag = { from: at(event), to: at(event) };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const p = at(event);
    const v = g.signal?.[g.view?.colour === "route" ? "gap" : g.view?.colour]?.[p];
    canvas.title = v === undefined ? "" : `step ${g.idx[p]}: ${Number.isNaN(v) ? "not measured" : v.toFixed(3)}`;
    if (drag) { drag.to = p; draw(); }
  });
  canvas.addEventListener("pointerup", () => {
    if (!drag) return;
    const [from, to] = [Math.min(drag.from, drag.to), Math.max(drag.from, drag.to)];
    drag = null;
    if (to - from >= 3) zoom(g, [from, to]);
    else select(g, from);
    draw();
  });
  canvas.addEventListener("dblclick", () => zoom(g, null));
  const watch = new ResizeObserver(draw);
  watch.observe(canvas);

  return {
    data(d) { canvas.style.height = `${d.height}px`; draw(); },
    update() { draw(); },
    stop() { watch.disconnect(); },
  };
}
