// The text, one span a token. Text only ever enters through textContent.
const OPEN = "\ue000", CLOSE = "\ue001";

function fill(span, shown) {
  for (const part of shown.split(OPEN)) {
    const end = part.indexOf(CLOSE);
    if (end < 0) { span.append(part); continue; }
    const mark = document.createElement("i");
    mark.textContent = part.slice(0, end);
    span.append(mark, part.slice(end + 1));
  }
}

function about(g, p) {
  const num = (name, unit = "") => {
    const v = g.signal[name][p];
    return Number.isNaN(v) ? null : `${name} ${v.toFixed(name === "latency" ? 1 : 3)}${unit}`;
  };
  const lines = [
    `step ${g.idx[p]}: ${TIERS[g.tier[p]] ?? "?"}, ${OUTCOMES[g.outcome[p]] ?? "?"}`,
    [num("gap"), num("entropy", " nats"), num("p_large"), num("latency", " ms")].filter(Boolean).join(", "),
  ];
  const shown = g.text[p];
  if (shown.includes(OPEN)) {
    const notes = [];
    if (/\ue000·+\ue001/.test(shown)) notes.push("· space");
    if (shown.includes("↵")) notes.push("↵ newline");
    if (shown.includes("⇥")) notes.push("⇥ tab");
    if (/\ue000([0-9A-F]{2} ?)+\ue001/.test(shown)) notes.push("hex: bytes of a character split over tokens");
    if (shown.includes("U+")) notes.push("U+…: an invisible character");
    if (/\ue000(?=[A-Z])(?![0-9A-F]{2}[ \ue001])(?!U\+)[A-Z0-9]+\ue001/.test(shown)) notes.push("ESC, NUL, …: a control character");
    if (shown.includes("… +")) notes.push("… +N: N characters not drawn");
    if (shown.includes("‹")) notes.push("‹…›: special token");
    if (shown.includes("∅")) notes.push("∅: adds no text");
    lines.push(notes.join("; "));
  }
  if (g.flags[p] & DISAGREES) lines.push("the large model wanted another token");
  return lines.filter(Boolean).join("\n");
}

function stripPart(g, root) {
  const box = document.createElement("div");
  box.className = "strip";
  box.tabIndex = 0;
  box.setAttribute("role", "listbox");
  box.setAttribute("aria-label", "output tokens");
  const before = document.createElement("div"), after = document.createElement("div");
  before.className = after.className = "elided";
  const text = document.createElement("div");
  text.className = "text";
  box.append(before, text, after);
  root.append(box);
  let spans = [], ends = {}, selected = null, version = null, painted = "", drawn = "";

  function build() {
    version = g.version;
    const all = document.createDocumentFragment();
    spans = new Array(g.n);
    ends = {};
    for (let p = 0; p < g.n; p += 1) {
      const span = document.createElement("span");
      const guard = g.flags[p] & GUARD ? " guard" : "";
      span.className = `t ${TIERS[g.tier[p]] ?? ""} ${OUTCOMES[g.outcome[p]] ?? ""}${guard}`;
      span.dataset.p = p;
      // A line break ending a token stands outside its span, so that the span's outline stays on one line.
      const breaks = /\n+$/.exec(g.text[p])?.[0] ?? "";
      fill(span, breaks ? g.text[p].slice(0, -breaks.length) : g.text[p]);
      spans[p] = span;
      all.append(span);
      if (breaks) {
        const line = document.createElement("span");
        line.className = span.className.replace(/^t /, "br ");
        line.textContent = breaks;
        ends[p] = line;
        all.append(line);
      }
    }
    text.replaceChildren(all);
    selected = null;
    painted = drawn = "";
  }

  function paint() {
    const v = g.view;
    if (!v) return;
    // Ten thousand spans are touched only when how they are drawn has changed.
    const drawing = JSON.stringify([version, v.colour, v.drafts, v.flips, v.found, v.after, g.zoom]);
    if (drawing === drawn) return;
    drawn = drawing;
    box.classList.toggle("drafts", !!v.drafts);
    box.dataset.colour = v.colour;
    const key = `${version}|${v.colour}`;
    if (painted !== key) {
      painted = key;
      const values = g.signal[v.colour];
      const [low, high] = values ? extent(g, v.colour) : [0, 1];
      for (let p = 0; p < g.n; p += 1) {
        const style = spans[p].style, x = values?.[p];
        if (values && !Number.isNaN(x)) {
          const [r, gr, b] = viridis((x - low) / (high - low));
          style.backgroundColor = `rgb(${r},${gr},${b})`;
          style.color = r * 0.3 + gr * 0.59 + b * 0.11 > 130 ? "#111" : "#fff";
        } else { style.backgroundColor = ""; style.color = ""; }
      }
    }
    const found = new Set(v.found ?? []), flips = new Set(v.flips ?? []);
    for (let p = 0; p < g.n; p += 1) {
      const list = spans[p].classList;
      list.toggle("after", v.after >= 0 && p > v.after);
      list.toggle("found", found.has(p));
      list.toggle("flip", flips.has(p));
      const out = !!g.zoom && (p < g.zoom[0] || p > g.zoom[1]);
      list.toggle("out", out);
      ends[p]?.classList.toggle("out", out);
    }
    before.textContent = g.zoom && g.zoom[0] > 0 ? `… ${g.zoom[0]} earlier rows (double-click the plot to see all)` : "";
    after.textContent = g.zoom && g.zoom[1] < g.n - 1 ? `… ${g.n - 1 - g.zoom[1]} later rows` : "";
  }

  function mark() {
    selected?.classList.remove("on");
    selected = spans[g.pos] ?? null;
    if (!selected) return;
    selected.classList.add("on");
    const at = selected.getBoundingClientRect(), frame = box.getBoundingClientRect();
    const margin = Math.min(40, frame.height / 4);
    if (g.view?.centre && g.centred !== g.version) {
      g.centred = g.version;
      box.scrollTop += at.top - frame.top - frame.height / 2;
    } else if (at.top < frame.top + margin) box.scrollTop += at.top - frame.top - margin;
    else if (at.bottom > frame.bottom - margin) box.scrollTop += at.bottom - frame.bottom + margin;
  }

  text.addEventListener("click", (event) => {
    const span = event.target.closest(".t");
    if (span) select(g, Number(span.dataset.p));
  });
  text.addEventListener("mouseover", (event) => {
    const span = event.target.closest(".t");
    if (span && !span.title) span.title = about(g, Number(span.dataset.p));
  });

  return {
    data(d) {
      box.style.height = `${d.height}px`;
      if (load(g, d)) changed(g, "columns");
      else if (version !== g.version) this.update("columns");
    },
    update(what) {
      if (g.version === null) return;
      if (version !== g.version) build();
      if (what !== "pos") paint();
      mark();
    },
  };
}
