// One group of mounts (a strip, its cursor, its plot) shares one state; Compare has two groups.
const groups = new Map();

function group(name) {
  if (!groups.has(name)) {
    groups.set(name, { name, n: 0, version: null, view: null, pos: 0, zoom: null, sent: 0, parts: new Set() });
  }
  return groups.get(name);
}

const decode = {
  u8: (s) => Uint8Array.from(atob(s), (c) => c.charCodeAt(0)),
  i32: (s) => new Int32Array(decode.u8(s).buffer),
  f32: (s) => new Float32Array(decode.u8(s).buffer),
};

const SIGNALS = ["gap", "entropy", "acceptance", "latency", "p_large"];
const TIERS = ["small", "large", "lookup", "middle", "middle2", "middle3"];
const OUTCOMES = ["kept", "accepted", "recovered", "bonus", "large", "forced", "rejected", "discarded"];
const UNWRITTEN = 6;
const GUARD = 1, DISAGREES = 2;

// Columns arrive packed: 10,000 steps are some 400 kB, and Streamlit sends them once.
function load(g, data) {
  if (g.version === data.version) return false;
  g.version = data.version;
  g.n = data.text.length;
  g.text = data.text;
  g.idx = decode.i32(data.idx);
  g.tier = decode.u8(data.tier);
  g.outcome = decode.u8(data.outcome);
  g.flags = decode.u8(data.flags);
  g.threshold = decode.f32(data.threshold);
  g.signal = {};
  for (const name of SIGNALS) g.signal[name] = decode.f32(data[name]);
  g.jumps = data.jumps;
  g.spans = null;
  g.extent = {};
  return true;
}

const written = (g, p) => g.outcome[p] < UNWRITTEN;

// The numbers at the two ends of a signal's colour scale: 0..1 for probabilities, 98 % of the rest else.
function extent(g, name) {
  if (!g.extent[name]) {
    if (name === "entropy" || name === "latency") {
      const values = Array.from(g.signal[name]).filter((v) => !Number.isNaN(v)).sort((a, b) => a - b);
      const top = values.length ? values[Math.floor((values.length - 1) * 0.98)] : 1;
      g.extent[name] = [0, top || 1];
    } else g.extent[name] = [0, 1];
  }
  return g.extent[name];
}

const VIRIDIS = ["#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"]
  .map((c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)));

function viridis(x) {
  const at = Math.min(Math.max(x, 0), 1) * (VIRIDIS.length - 1);
  const i = Math.min(Math.floor(at), VIRIDIS.length - 2);
  return VIRIDIS[i].map((c, k) => Math.round(c + (VIRIDIS[i + 1][k] - c) * (at - i)));
}

// Next step in a direction, over shown rows alone.
function move(g, by) {
  const shown = (p) => (g.view?.drafts || written(g, p)) && (!g.zoom || (p >= g.zoom[0] && p <= g.zoom[1]));
  const way = Math.sign(by);
  let at = g.pos, left = Math.abs(by), last = g.pos;
  while (left > 0) {
    at += way;
    if (at < 0 || at >= g.n) break;
    if (shown(at)) { last = at; left -= 1; }
  }
  return last;
}

// The same walk as Steps.jump in steps.py.
function jump(g, kind, back) {
  const places = g.jumps?.[kind] ?? [];
  if (kind === "lowest gap") {
    const rank = places.indexOf(g.pos);
    return rank < 0 ? places[0] ?? g.pos : places[rank + (back ? -1 : 1)] ?? g.pos;
  }
  if (!back) return places.find((p) => p > g.pos) ?? g.pos;
  for (let i = places.length - 1; i >= 0; i -= 1) if (places[i] < g.pos) return places[i];
  return g.pos;
}

function changed(g, what) {
  for (const part of g.parts) part.update(what);
}

// Select here at once; tell Python soon, and once for a burst of key presses.
function select(g, pos) {
  if (pos === g.pos || pos < 0 || pos >= g.n) return;
  g.pos = pos;
  if (g.zoom && (pos < g.zoom[0] || pos > g.zoom[1])) g.zoom = null;
  changed(g, "pos");
  report(g);
}

function zoom(g, range) {
  g.zoom = range;
  changed(g, "zoom");
  report(g);
}

function report(g) {
  g.sent += 1;
  if (g.timer) return;
  const since = performance.now() - (g.last ?? 0);
  g.timer = setTimeout(() => {
    g.timer = null;
    g.last = performance.now();
    g.send?.({ pos: g.pos, zoom: g.zoom, n: g.sent });
  }, Math.max(0, 110 - since));
}
