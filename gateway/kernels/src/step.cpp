// A decoder's forward pass over flat tokens of several rows. This file is compiled once per instruction
// set (-DISA=...); every result depends on its own row alone, not on neighbours, threads or the set.
#include "weights4.h"

namespace tokentape::ISA {
namespace {

template <class F>
INLINE void each(Worker& me, int64_t count, F f) {
  Phase& phase = *me.phase++;
  int64_t units = 0;
  for (int64_t i; (i = phase.take()) < count; ++units) f(i);
  phase.finish(units, count);
}

INLINE int64_t items(const Linear& w) { return (w.n + kItem - 1) / kItem; }

INLINE float inverse_rms(const float* x, int64_t n, float eps) {
  v16 squares = {};
  for (int64_t i = 0; i < n; i += 16) squares = fma(load(x + i), load(x + i), squares);
  return 1.f / __builtin_sqrtf(sum(squares) / static_cast<float>(n) + eps);
}

INLINE void norm_and_quantize(const Activations& x, int64_t row, const float* h, const float* weight, int64_t n, float eps) {
  const v16 inverse = splat(inverse_rms(h, n, eps));
  quantize_groups(x, row, n, 0, x.groups, [&](int64_t i) { return load(h + i) * inverse * load(weight + i); });
}

INLINE v16 activate(v16 x, Activation kind) {
  if (kind == Activation::silu) return x / (exponential(-x) + 1.f);
  const v16 inner = (x * x * x * 0.044715f + x) * 0.7978845608f;
  return x - x / (exponential(inner + inner) + 1.f);  // x (1 + tanh(inner)) / 2
}

void embed_token(const Model& m, int64_t token, float* h) {
  const int64_t base = token * m.hidden;
  for (int64_t i = 0; i < m.hidden; i += 16) {
    const v16 e = m.embed_dtype == Dtype::f32 ? load(static_cast<const float*>(m.embed) + base + i)
                                              : from_bf16(static_cast<const uint16_t*>(m.embed) + base + i);
    store(h + i, e * m.embed_scale);
  }
}

// Rotates the first rope_dim values of a head in place (halves paired, as in transformers).
INLINE void rotate(const Model& m, float* x, int64_t position) {
  const int64_t half = m.rope_dim / 2;
  const float *cos = m.cos + position * half, *sin = m.sin + position * half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

INLINE void head_norm(float* x, const float* weight, int64_t n, float eps) {
  const v16 inverse = splat(inverse_rms(x, n, eps));
  for (int64_t i = 0; i < n; i += 16) store(x + i, load(x + i) * inverse * load(weight + i));
}

INLINE void write_cache(void* cache, Dtype type, int64_t at, const float* x, int64_t n) {
  if (type == Dtype::f32) {
    std::memcpy(static_cast<float*>(cache) + at, x, n * sizeof(float));
  } else {
    uint16_t* out = static_cast<uint16_t*>(cache) + at;
    for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(x[i]);
  }
}

// Norms and rotates a token's q (in place) and k, and puts k and v into its cache slot.
void append_token(const Model& m, const Layer& layer, const Pass& p, int64_t index, int64_t t, float* qkv) {
  const int64_t d = m.head_dim, position = p.positions[t];
  const int64_t block = p.block_table[p.rows[t] * p.blocks_per_row + position / p.block_size];
  float *k = qkv + m.heads * d, *v = k + m.kv_heads * d;
  for (int64_t head = 0; head < m.heads + m.kv_heads; ++head) {
    const float* weight = head < m.heads ? layer.q_norm : layer.k_norm;
    if (weight) head_norm(qkv + head * d, weight, d, m.eps);
    rotate(m, qkv + head * d, position);
  }
  for (int64_t head = 0; head < m.kv_heads; ++head) {
    const int64_t at = ((block * m.kv_heads + head) * p.block_size + position % p.block_size) * d;
    write_cache(p.k_cache[index], p.kv_dtype, at, k + head * d, d);
    write_cache(p.v_cache[index], p.kv_dtype, at, v + head * d, d);
  }
}

// Walks a row's keys (or values) sixteen at a time, copied into `at` as float32 [16, head_dim]: one stride for
// all, so that the loops over them need no pointer for each.
struct Keys {
  const Model& m;
  const Pass& p;
  const void* cache;
  const int64_t* table;
  int64_t head, slot = 0, left = 0;
  float* at;

  Keys(const Model& model, const Pass& pass, const void* kv, int64_t row, int64_t kv_head, float* room)
      : m(model), p(pass), cache(kv), table(pass.block_table + row * pass.blocks_per_row), head(kv_head), at(room) {}

  void next(int64_t count) {
    float* to = at;
    for (int64_t j = 0; j < count; ++j) {
      if (left == 0) {
        slot = (*table++ * m.kv_heads + head) * p.block_size;
        left = p.block_size;
      }
      const int64_t offset = slot++ * m.head_dim;
      --left;
      if (p.kv_dtype == Dtype::f32)
        for (int64_t i = 0; i < m.head_dim; i += 16, to += 16) store(to, load(static_cast<const float*>(cache) + offset + i));
      else
        for (int64_t i = 0; i < m.head_dim; i += 16, to += 16) store(to, from_bf16(static_cast<const uint16_t*>(cache) + offset + i));
    }
  }
};

// Scores of sixteen keys: q [d], keys [16, d].
INLINE v16 dot_keys(const float* q, const float* keys, int64_t d) {
  v16 acc[16] = {};
  for (int64_t c = 0; c < d; c += 16, keys += 16) {
    const v16 qv = load(q + c);
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) acc[j] = fma(qv, load(keys + j * d), acc[j]);
  }
  return sum_each(acc);
}

// Adds `count` values, weighted, to C sixteens of the outputs of H heads: p [H][stride], out [H][d].
template <int C, int H>
INLINE void add_values(const float* v, int64_t d, int64_t count, const float* p, int64_t stride, float* out) {
  v16 acc[H][C];
#pragma GCC unroll 2
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) acc[h][c] = load(out + h * d + c * 16);
  for (int64_t j = 0; j < count; ++j, v += d)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const v16 value = load(v + c * 16);
#pragma GCC unroll 2
      for (int h = 0; h < H; ++h) acc[h][c] = fma(splat(p[h * stride + j]), value, acc[h][c]);
    }
#pragma GCC unroll 2
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(out + h * d + c * 16, acc[h][c]);
}

template <int H>
INLINE void add_heads(const float* v, int64_t d, int64_t count, const float* p, int64_t stride, float* out) {
  int64_t c = 0;
  for (; c + 128 <= d; c += 128) add_values<8, H>(v + c, d, count, p, stride, out + c);
  for (; c + 64 <= d; c += 64) add_values<4, H>(v + c, d, count, p, stride, out + c);
  for (; c < d; c += 16) add_values<1, H>(v + c, d, count, p, stride, out + c);
}

// One token's attention for `count` query heads of one key head; keys in order, so that the result is
// the same whether the token is decoded alone or prefilled among others.
void attend(const Model& m, const Pass& p, int64_t layer, int64_t t, int64_t kv_head, int64_t count, const float* q,
            float* out, float* entropy, float* scores) {
  const int64_t d = m.head_dim, keys = p.positions[t] + 1, padded = (keys + 15) / 16 * 16;
  alignas(64) float room[16 * kMaxHeadDim];
  Keys walk(m, p, p.k_cache[layer], p.rows[t], kv_head, room);
  for (int64_t first = 0; first < keys; first += 16) {
    const int64_t here = keys - first < 16 ? keys - first : 16;
    walk.next(here);
    for (int64_t g = 0; g < count; ++g) {
      float* s = scores + g * padded + first;
      store(s, dot_keys(q + g * d, walk.at, d) * m.attention_scale);
      for (int64_t j = here; j < 16; ++j) s[j] = -3.0e38f;
    }
  }
  for (int64_t g = 0; g < count; ++g) {
    float* s = scores + g * padded;
    v16 top = load(s), total = {}, weighted = {};
    for (int64_t i = 16; i < padded; i += 16) top = vmax(top, load(s + i));
    const float most = largest(top);
    for (int64_t i = 0; i < padded; i += 16) {
      const v16 x = load(s + i) - most;
      v16 e = exponential(x);
      for (int64_t j = keys - i; j < 16; ++j) e[j] = 0.f;
      total += e;
      if (entropy) weighted = fma(e, vmax(x, splat(-1.0e4f)), weighted);
      store(s + i, e);
    }
    scores[count * padded + g] = sum(total);
    if (entropy) entropy[g] = __builtin_logf(sum(total)) - sum(weighted) / sum(total);
  }
  std::memset(out, 0, count * d * sizeof(float));
  Keys values(m, p, p.v_cache[layer], p.rows[t], kv_head, room);
  for (int64_t first = 0; first < keys; first += 16) {
    const int64_t here = keys - first < 16 ? keys - first : 16;
    values.next(here);
    int64_t g = 0;
    for (; g + 2 <= count; g += 2) add_heads<2>(values.at, d, here, scores + g * padded + first, padded, out + g * d);
    if (g < count) add_heads<1>(values.at, d, here, scores + g * padded + first, padded, out + g * d);
  }
  for (int64_t g = 0; g < count; ++g)
    for (int64_t i = 0; i < d; ++i) out[g * d + i] /= scores[count * padded + g];
}

void attention(Worker& me, const Model& m, const Pass& p, int64_t layer, const float* q, int64_t q_stride,
               float* out, float* entropy, Scratch& s) {
  const int64_t shared = m.heads / m.kv_heads;
  const int64_t count = p.num_tokens * m.kv_heads >= me.threads ? shared : 1, parts = m.heads / count;
  float* scores = s.scores + me.thread * s.scores_per_thread;
  each(me, p.num_tokens * parts, [&](int64_t i) {
    const int64_t t = i / parts, head = i % parts * count;
    attend(m, p, layer, t, head / shared, count, q + t * q_stride + head * m.head_dim,
           out + (t * m.heads + head) * m.head_dim, entropy ? entropy + t * m.heads + head : nullptr, scores);
  });
}

void project(Worker& me, const Linear& w, const Activations& x, Output y, bool amx) {
  const Phase& phase = *me.phase;
  each(me, items(w), [&](int64_t i) { any_item(w, x, i, phase, y, amx); });
}

Activations shaped(const Activations& x, int64_t rows, const Linear& w) {
  return {x.q, x.scale, x.sum, rows, (rows + 63) / 64 * 64, w.groups};
}

void forward(Worker me, const Model& m, const Pass& p, Scratch& s, bool amx) {
  const int64_t tokens = p.num_tokens, width = m.heads * m.head_dim, qkv_width = width + 2 * m.kv_heads * m.head_dim;
  each(me, tokens, [&](int64_t t) { embed_token(m, p.tokens[t], s.h + t * m.hidden); });
  for (int64_t l = 0; l < m.num_layers; ++l) {
    const Layer& layer = m.layers[l];
    const Activations in = shaped(s.x, tokens, layer.qkv), mixed = shaped(s.x, tokens, layer.o);
    const Activations inner = shaped(s.x, tokens, layer.down);
    each(me, tokens, [&](int64_t t) { norm_and_quantize(in, t, s.h + t * m.hidden, layer.input_norm, m.hidden, m.eps); });
    project(me, layer.qkv, in, {s.wide, qkv_width, false}, amx);
    each(me, tokens, [&](int64_t t) { append_token(m, layer, p, l, t, s.wide + t * qkv_width); });
    attention(me, m, p, l, s.wide, qkv_width, s.narrow, l + 1 == m.num_layers ? s.entropy : nullptr, s);
    each(me, tokens, [&](int64_t t) {
      quantize_groups(mixed, t, width, 0, mixed.groups, [&](int64_t i) { return load(s.narrow + t * width + i); });
    });
    project(me, layer.o, mixed, {s.h, m.hidden, true}, amx);
    each(me, tokens, [&](int64_t t) { norm_and_quantize(in, t, s.h + t * m.hidden, layer.post_norm, m.hidden, m.eps); });
    project(me, layer.gate_up, in, {s.wide, 2 * m.intermediate, false}, amx);
    const int64_t parts = (inner.groups + 7) / 8;
    each(me, tokens * parts, [&](int64_t i) {
      const int64_t t = i / parts, first = i % parts * 8, last = first + 8 < inner.groups ? first + 8 : inner.groups;
      const float *gate = s.wide + t * 2 * m.intermediate, *up = gate + m.intermediate;
      quantize_groups(inner, t, m.intermediate, first, last,
                      [&](int64_t j) { return activate(load(gate + j), m.activation) * load(up + j); });
    });
    project(me, layer.down, inner, {s.h, m.hidden, true}, amx);
  }
  const Activations last = shaped(s.x, p.num_wanted, m.head);
  each(me, p.num_wanted, [&](int64_t i) {
    const int64_t t = p.wanted[i];
    const float* h = s.h + t * m.hidden;
    float* hidden = p.hidden + i * m.hidden;
    const v16 inverse = splat(inverse_rms(h, m.hidden, m.eps));
    for (int64_t j = 0; j < m.hidden; j += 16) store(hidden + j, load(h + j) * inverse * load(m.final_norm + j));
    quantize_groups(last, i, m.hidden, 0, last.groups, [&](int64_t j) { return load(hidden + j); });
    float mean = 0.f;
    for (int64_t head = 0; head < m.heads; ++head) mean += s.entropy[t * m.heads + head];
    p.attn_entropy[i] = mean / static_cast<float>(m.heads);
  });
  project(me, m.head, last, {p.logits, m.vocab, false}, amx);
}

// The k largest of `count` values, first the largest, of equal ones the first. A stretch is looked at one by
// one only where its largest value belongs among them.
void find_top(const float* x, int64_t count, int64_t k, int64_t* ids, float* values) {
  constexpr int64_t stretch = 64;
  int64_t found = 0;
  const auto insert = [&](int64_t i) {
    if (found == k && !(x[i] > values[k - 1])) return;
    int64_t at = found < k ? found++ : k - 1;
    for (; at > 0 && x[i] > values[at - 1]; --at) ids[at] = ids[at - 1], values[at] = values[at - 1];
    ids[at] = i, values[at] = x[i];
  };
  for (int64_t first = 0; first < count; first += stretch) {
    const int64_t end = first + stretch < count ? first + stretch : count;
    if (found == k && end == first + stretch) {
      v16 top = load(x + first);
      for (int64_t i = 16; i < stretch; i += 16) top = vmax(top, load(x + first + i));
      if (!(largest(top) > values[k - 1])) continue;
    }
    for (int64_t i = first; i < end; ++i) insert(i);
  }
}

// Sums run over stretches in float32 and over those in float64, always cut at the same places.
void softmax_sums(const float* x, int64_t count, float most, double* total, double* weighted) {
  constexpr int64_t stretch = 1024;
  *total = *weighted = 0.0;
  for (int64_t first = 0; first < count; first += stretch) {
    const int64_t end = first + stretch < count ? first + stretch : count;
    v16 sums = {}, products = {};
    for (int64_t i = first; i < end; i += 16) {
      v16 below = splat(-3.0e38f);
      if (i + 16 <= end) below = load(x + i);
      else std::memcpy(&below, x + i, (end - i) * sizeof(float));
      below = vmax(below - most, splat(-1.0e4f));  // a masked token's -inf times e^-inf would be no number
      v16 e = exponential(below);
      if (i + 16 > end)
        for (int64_t j = end - i; j < 16; ++j) e[j] = 0.f;
      sums += e;
      products = fma(e, below, products);
    }
    *total += sum(sums);
    *weighted += sum(products);
  }
}

void summarize(Worker me, const float* logits, int64_t stride, int64_t rows, int64_t vocab, int64_t k, Summary first) {
  each(me, rows, [&](int64_t row) {
    const float* x = logits + row * stride;
    float* top = first.logits + row * k;
    find_top(x, vocab, k, first.ids + row * k, top);
    double total, weighted;
    softmax_sums(x, vocab, top[0], &total, &weighted);
    const double log_total = __builtin_log(total);
    first.norm[row] = static_cast<float>(top[0] + log_total);
    first.entropy[row] = static_cast<float>(log_total - weighted / total);
  });
}

void linear(Worker me, const Linear& w, const float* x, Activations a, float* y, bool amx) {
  each(me, a.rows, [&](int64_t t) {
    quantize_groups(a, t, w.k, 0, w.groups, [&](int64_t i) { return load(x + t * w.k + i); });
  });
  project(me, w, a, {y, w.n, false}, amx);
}

void pack(Worker me, const void* weight, Dtype type, int64_t n, int64_t k, int64_t bits, uint8_t* packed,
          uint16_t* scale) {
  const int64_t blocks = (n + kItem - 1) / kItem * (kItem / kBlock);
  each(me, blocks, [&](int64_t b) { (bits == 4 ? pack_block4 : pack_block)(weight, type, n, k, b, packed, scale); });
}

#if defined(__AMX_INT8__)
thread_local TileConfig found;  // what another library set once for this thread, as llama.cpp does, it keeps
#endif

void enter(bool amx) {
#if defined(__AMX_INT8__)
  static constexpr TileConfig config{};  // in memory: gcc does not see that the instruction reads all 64 bytes
  if (!amx) return;
  _tile_storeconfig(&found);
  _tile_loadconfig(&config);
#else
  (void)amx;
#endif
}

void leave(bool amx) {
#if defined(__AMX_INT8__)
  if (!amx) return;
  if (found.palette) _tile_loadconfig(&found);
  else _tile_release();
#else
  (void)amx;
#endif
}

// Reads everything once, four streams at a time as the products do: the memory roof that bench divides by.
int64_t read(Worker me, const uint8_t* bytes, int64_t count) {
  constexpr int64_t unit = 1 << 18;
  v16i seen[4] = {};
  each(me, count / unit, [&](int64_t i) {
    for (const uint8_t *p = bytes + i * unit, *end = p + unit / 4; p < end; p += 64)
      for (int j = 0; j < 4; ++j) seen[j] ^= *reinterpret_cast<const v16i*>(p + j * (unit / 4));
  });
  return sum(seen[0] ^ seen[1] ^ seen[2] ^ seen[3]);
}

// The rate of the dot product's own instructions, sums in registers: the arithmetic roof that bench divides by.
double peak(bool amx, int64_t repeats) {
#if defined(__AMX_INT8__)
  if (amx) {
    for (int64_t i = 0; i < repeats; ++i) {
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
    return 4.0 * 16 * 16 * 64 * static_cast<double>(repeats);
  }
#endif
  (void)amx;
#if defined(__AVX512VNNI__)
  v16i acc[16] = {};
  const __m512i w = _mm512_set1_epi8(3), x = _mm512_set1_epi8(1);
  for (int64_t i = 0; i < repeats; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) dot4(acc[j], w, x);
#pragma GCC unroll 16
  for (int j = 1; j < 16; ++j) acc[0] += acc[j];
  volatile int32_t keep = acc[0][0];
  (void)keep;
  return 16.0 * 64 * static_cast<double>(repeats);
#elif defined(__AVX2__)
  __m256i acc[8] = {};
  const __m256i w = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1);
  alignas(4) const int8_t x[4] = {1, 1, 1, 1};
  for (int64_t i = 0; i < repeats; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) dot4(acc[j], w, w, x, ones);
#pragma GCC unroll 8
  for (int j = 1; j < 8; ++j) acc[0] = _mm256_add_epi32(acc[0], acc[j]);
  volatile int32_t keep = _mm256_extract_epi32(acc[0], 0);
  (void)keep;
  return 8.0 * 32 * static_cast<double>(repeats);
#else
  (void)repeats;
  return 0.0;
#endif
}

}  // namespace

const Kernels kernels = {enter, leave, pack, linear, attention, forward, summarize, read, peak};

}  // namespace tokentape::ISA
