// Where the reader is: takes the view from Python, the keys from the page, draws the legend.
const KEYS = [
  ["← →", "one step"], ["shift ← →", "ten steps"], ["home end", "first, last step"],
  ["R", "next rejection"], ["L", "next token of the large model"], ["G", "next guard hit"],
  ["A", "next token the large model disagrees with"], ["M", "lowest gap, then the next lowest"],
  ["shift + letter", "back"], ["space", "play"], ["F", "fork here"], ["?", "this list"],
];
const LETTERS = { r: "rejection", l: "large", g: "guard", a: "audit", m: "lowest gap" };

function typing(event) {
  const at = event.composedPath()[0];
  if (!(at instanceof Element)) return false;
  if (at.closest("input, textarea, select, [contenteditable=true]")) return true;
  if (at.closest("[role=slider]")) return event.key.startsWith("Arrow") || event.key === "Home" || event.key === "End";
  // A button reached with the keyboard keeps its space bar; one that was clicked does not.
  return event.key === " " && at.matches("button:focus-visible, a:focus-visible");
}

function cursorPart(g, root) {
  const legend = document.createElement("div");
  legend.className = "legend";
  const help = document.createElement("div");
  help.className = "help";
  help.hidden = true;
  const list = document.createElement("dl");
  for (const [key, what] of KEYS) {
    const dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = key;
    dd.textContent = what;
    list.append(dt, dd);
  }
  help.append(list);
  help.addEventListener("click", () => { help.hidden = true; });
  root.append(legend, help);
  let playing = null, nonce = null, send = null, act = null;

  function play(on) {
    clearInterval(playing);
    playing = on ? setInterval(() => {
      const next = move(g, 1);
      if (next === g.pos) play(false);
      else select(g, next);
    }, 125) : null;
    draw();
  }

  function key(event) {
    if (!g.view?.keys || event.ctrlKey || event.metaKey || event.altKey || typing(event)) return;
    if (document.querySelector("[role=dialog]")) return;
    const far = event.shiftKey ? 10 : 1, letter = event.key.toLowerCase();
    if (event.key === "ArrowRight") select(g, move(g, far));
    else if (event.key === "ArrowLeft") select(g, move(g, -far));
    else if (event.key === "Home") select(g, move(g, -g.n));
    else if (event.key === "End") select(g, move(g, g.n));
    else if (LETTERS[letter]) select(g, jump(g, LETTERS[letter], event.shiftKey));
    else if (event.key === " ") play(!playing);
    else if (letter === "f") act?.("fork");
    else if (event.key === "?") help.hidden = !help.hidden;
    else if (event.key === "Escape" && !help.hidden) help.hidden = true;
    else return;
    // Streamlit has keys of its own (R reruns, C clears).
    event.preventDefault();
    event.stopImmediatePropagation();
  }
  window.addEventListener("keydown", key, true);

  function chip(cls, label) {
    const item = document.createElement("span"), swatch = document.createElement("b");
    swatch.className = `t ${cls}`;
    swatch.textContent = "ab";
    item.append(swatch, ` ${label}`);
    return item;
  }

  function draw() {
    const v = g.view;
    if (!v || g.version === null) return;
    const parts = [];
    if (v.colour === "route") {
      parts.push(chip("small accepted", "small"), chip("large", "large"));
      if (g.tier.includes(2)) parts.push(chip("lookup", "lookup"));
      TIERS.slice(3).forEach((name, i) => { if (g.tier.includes(3 + i)) parts.push(chip(name, name)); });
      if (v.drafts) parts.push(chip("rejected", "rejected draft"));
      if (g.flags.some((f) => f & GUARD)) parts.push(chip("guard large", "guard"));
    } else {
      const [low, high] = extent(g, v.colour);
      const unit = { entropy: " nats", latency: " ms" }[v.colour] ?? "";
      const bar = document.createElement("u");
      bar.style.background = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map((x) => `rgb(${viridis(x)})`)})`;
      const from = document.createElement("span"), to = document.createElement("span");
      from.textContent = `${v.colour} ${low.toFixed(high > 10 ? 0 : 2)}`;
      to.textContent = `${high.toFixed(high > 10 ? 0 : 2)}${unit}`;
      parts.push(from, bar, to);
    }
    if (v.note) {
      const note = document.createElement("em");
      note.textContent = v.note;
      parts.push(note);
    }
    if (playing) parts.push("▶ playing, space stops");
    legend.replaceChildren(...parts);
  }

  return {
    data(d, component) {
      send = (value) => component.setTriggerValue("step", value);
      act = (what) => component.setTriggerValue("act", { what, pos: g.pos, n: g.sent });
      g.send = send;
      g.view = d;
      if (g.session !== d.session) { g.session = d.session; g.sent = 0; }
      // An answer to an older message must not pull the reader back.
      if (d.ack >= g.sent) { g.sent = d.ack; g.pos = d.pos; g.zoom = d.zoom; }
      if (nonce !== null && nonce !== d.play) play(!playing);
      nonce = d.play;
      if (d.url && location.search !== `?${d.url}`) history.replaceState(history.state, "", `?${d.url}`);
      changed(g, "view");
    },
    update(what) { if (what !== "pos") draw(); },
    stop() {
      window.removeEventListener("keydown", key, true);
      clearInterval(playing);
    },
  };
}
