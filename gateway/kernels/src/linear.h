// The int8 product of one unit of work: 64 outputs for all rows of the pass. Dot products of a group are
// exact integers and groups are added in order, so every path and every batch gives the same bits.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace tokentape {
namespace {

struct Output {
  float* data;
  int64_t stride;
  bool add;  // y += x W^T + bias, the residual stream
};

INLINE void put(const Linear& w, const Output& y, int64_t row, int64_t block, v16 value) {
  const int64_t n0 = block * kBlock, count = w.n - n0 < kBlock ? w.n - n0 : kBlock;
  if (count <= 0) return;
  float* out = y.data + row * y.stride + n0;
  if (count == kBlock) {
    if (w.bias) value += load(w.bias + n0);
    store(out, y.add ? load(out) + value : value);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float v = w.bias ? value[i] + w.bias[n0 + i] : value[i];
    out[i] = y.add ? out[i] + v : v;
  }
}

INLINE v16 scales_of(const Linear& w, int64_t block, int64_t g) {
  return from_bf16(w.scale + (block * w.groups + g) * kBlock);
}

// The scale of both sides first, then one fused step: the order every path keeps.
INLINE v16 add_group(v16 total, v16i dot, v16 w_scale, float x_scale) {
  return fma(__builtin_convertvector(dot, v16), w_scale * x_scale, total);
}

#if defined(__AVX512VNNI__)

INLINE void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// Inline assembly keeps the accumulators in registers: gcc spills them around the intrinsic, at half the speed.
INLINE void dot4(v16i& acc, __m512i w, __m512i x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
}

INLINE __m512i quad(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm512_set1_epi32(four);
}

// What the tile needs of a weight's format; weights4.h has the other one.
struct Int8 {
  static constexpr int64_t kBytes = kGroup * kBlock;  // of one block's group

  // One group of two blocks for M rows; the next group is prefetched meanwhile.
  template <int M>
  INLINE void dot_group(const uint8_t* w0, const uint8_t* w1, const int8_t* xp, const int32_t* sum, v16i dot[M][2]) {
    for (int m = 0; m < M; ++m) dot[m][0] = dot[m][1] = v16i{} + sum[m];
    for (int64_t k = 0; k < kGroup; k += 4, w0 += 64, w1 += 64, xp += 4) {
      prefetch(w0 + kBytes);
      prefetch(w1 + kBytes);
      const __m512i a = _mm512_loadu_si512(w0), b = _mm512_loadu_si512(w1);
      for (int m = 0; m < M; ++m) {
        const __m512i xv = quad(xp + m * kGroup);
        dot4(dot[m][0], a, xv);
        dot4(dot[m][1], b, xv);
      }
    }
  }

  // One group of two blocks for the tile unit, read where it lies; `ahead` brings the next a thirty-second nearer.
  struct Tiles {
    const uint8_t *first, *second;

    void start(const uint8_t*, const uint8_t*) {}

    void turn(const uint8_t* w0, const uint8_t* w1, const uint8_t*, const uint8_t*) { first = w0, second = w1; }

    void ahead(int64_t i) {
      prefetch(first + kBytes + i * 64);
      prefetch(second + kBytes + i * 64);
    }
  };
};

// M rows by the four blocks of a unit, group by group: four streams of weights keep the memory busier than two.
template <class Format, int M>
void vnni_tile(const Linear& w, const Activations& x, int64_t block, int64_t row, const Output& y) {
  constexpr int B = kItem / kBlock;
  v16 total[M][B] = {};
  const int64_t stride = w.groups * Format::kBytes;
  const uint8_t* wp = w.weight + block * stride;
  for (int64_t g = 0; g < w.groups; ++g, wp += Format::kBytes) {
    const int64_t at = g * x.padded + row;
    const int8_t* xp = x.q + at * kGroup;
    for (int b = 0; b < B; b += 2) {
      v16i dot[M][2];
      Format::template dot_group<M>(wp + b * stride, wp + (b + 1) * stride, xp, x.sum + at, dot);
      const v16 ws[2] = {scales_of(w, block + b, g), scales_of(w, block + b + 1, g)};
      for (int m = 0; m < M; ++m)
        for (int i = 0; i < 2; ++i) total[m][b + i] = add_group(total[m][b + i], dot[m][i], ws[i], x.scale[at + m]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int b = 0; b < B; ++b) put(w, y, row + m, block + b, total[m][b]);
}

constexpr int64_t kVnniRows = 12;  // as many sums fit the registers

template <class Format>
void vnni_item(const Linear& w, const Activations& x, int64_t block, const Output& y) {
  using Tile = void (*)(const Linear&, const Activations&, int64_t, int64_t, const Output&);
  static constexpr Tile tiles[kVnniRows] = {
      vnni_tile<Format, 1>, vnni_tile<Format, 2>, vnni_tile<Format, 3>, vnni_tile<Format, 4>,
      vnni_tile<Format, 5>, vnni_tile<Format, 6>, vnni_tile<Format, 7>, vnni_tile<Format, 8>,
      vnni_tile<Format, 9>, vnni_tile<Format, 10>, vnni_tile<Format, 11>, vnni_tile<Format, 12>};
  for (int64_t row = 0; row < x.rows; row += kVnniRows)
    tiles[(x.rows - row < kVnniRows ? x.rows - row : kVnniRows) - 1](w, x, block, row, y);
}

#if defined(__AMX_INT8__)

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Sixteen rows' outputs of one block, to be written soon.
INLINE void prefetch_outputs(const Output& y, int64_t row, int64_t block) {
  const float* out = y.data + row * y.stride + block * kBlock;
  for (int r = 0; r < 16; ++r) __builtin_prefetch(out + r * y.stride, 1);
}

// Up to 64 rows by the four blocks of a unit, two blocks and 16 rows at a time: tiles 0-1 are products, 2-3
// activations, 4-7 weights. The integers of one step are scaled while the tile unit works on the next.
template <class Format>
void amx_tile(const Linear& w, const Activations& x, int64_t block, int64_t row, int64_t rows, const Output& y) {
  alignas(64) float total[64][kItem] = {};
  alignas(64) int32_t dot[2][2][16][16];
  const int64_t stride = w.groups * Format::kBytes, steps = (rows + 15) / 16, lines = 32 / steps;
  struct Step {
    int64_t group, block, row;
    int buffer;
  };
  const auto scale_step = [&](const Step& s) {
    const v16 ws0 = scales_of(w, block + s.block, s.group), ws1 = scales_of(w, block + s.block + 1, s.group);
    const int64_t at = s.group * x.padded + row + s.row, last = rows - s.row < 16 ? rows - s.row : 16;
    const float* scale = x.scale + at;
    const int32_t* offset = x.sum + at;
    const auto* d = reinterpret_cast<const v16i*>(dot[s.buffer]);
    float* t = total[s.row] + s.block * kBlock;
#pragma GCC unroll 4
    for (int64_t r = 0; r < last; ++r, t += kItem) {
      store(t, add_group(load(t), d[r] + offset[r], ws0, scale[r]));
      store(t + 16, add_group(load(t + 16), d[r + 16] + offset[r], ws1, scale[r]));
    }
  };
  Step before{0, 0, 0, -1};
  const uint8_t* wp = w.weight + block * stride;
  alignas(64) typename Format::Tiles tiles;
  tiles.start(wp, wp + stride);
  for (int64_t g = 0; g < w.groups; ++g, wp += Format::kBytes) {
    const int8_t* xp = x.q + (g * x.padded + row) * kGroup;
    for (int64_t b = 0; b < 4; b += 2) {
      const uint8_t *w0 = wp + b * stride, *w1 = w0 + stride;
      const uint8_t* next = b == 0 ? w0 + 2 * stride : g + 1 < w.groups ? w0 - 2 * stride + Format::kBytes : nullptr;
      tiles.turn(w0, w1, next, next ? next + stride : nullptr);
      _tile_loadd(4, tiles.first, 64);
      _tile_loadd(5, tiles.first + 1024, 64);
      _tile_loadd(6, tiles.second, 64);
      _tile_loadd(7, tiles.second + 1024, 64);
      for (int64_t step = 0; step < steps; ++step) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_loadd(2, xp + step * 16 * kGroup, kGroup);
        _tile_loadd(3, xp + step * 16 * kGroup + 64, kGroup);
        _tile_dpbsud(0, 2, 4);
        _tile_dpbsud(1, 2, 6);
        _tile_dpbsud(0, 3, 5);
        _tile_dpbsud(1, 3, 7);
        // The weights to come, a share in each step: all at once they would hold up the tiles' own loads.
        for (int64_t i = step * lines, end = step + 1 == steps ? 32 : i + lines; i < end; ++i) tiles.ahead(i);
        if (b == 2 && g + 4 >= w.groups) prefetch_outputs(y, row + step * 16, block + g + 4 - w.groups);
        if (before.buffer >= 0) scale_step(before);
        before = {g, b, step * 16, before.buffer == 0};
        _tile_stored(0, dot[before.buffer][0], 64);
        _tile_stored(1, dot[before.buffer][1], 64);
      }
    }
  }
  scale_step(before);
  for (int64_t r = 0; r < rows; ++r)
    for (int b = 0; b < 4; ++b) put(w, y, row + r, block + b, load(total[r] + kBlock * b));
}

template <class Format>
void amx_item(const Linear& w, const Activations& x, int64_t block, const Output& y) {
  for (int64_t row = 0; row < x.rows; row += 64)
    amx_tile<Format>(w, x, block, row, x.rows - row < 64 ? x.rows - row : 64, y);
}

constexpr int64_t kAmxRows = 13;  // fewer rows are bound by memory either way

#endif
#endif

#if !defined(__AVX512VNNI__)

using Totals = float (*)[kItem];

// One group of a unit's four blocks, bytes `stride` apart; `ahead` of each lie the bytes to be read next.
struct Spread {
  const uint8_t* first;
  int64_t stride, ahead;
};

// Where a thread is in a weight: a group of the unit that starts at `block`, and how many groups further on in memory
// it goes on, with the next group or with the first of its next unit.
struct Place {
  int64_t block, g, next;
};

template <class Format>
INLINE Spread group_of(const Linear& w, const Place& at) {
  return {w.weight + (at.block * w.groups + at.g) * Format::kBytes, w.groups * Format::kBytes, at.next * Format::kBytes};
}

#endif

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

INLINE void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// What a product needs of a weight's format; weights4.h has the other one.
struct Int8 {
  static constexpr int64_t kBytes = kGroup * kBlock;  // of one block's group
  static constexpr int64_t kInputs = 4;               // of a line of 64 bytes

  INLINE Spread unpacked(const Linear& w, const Place& at, uint8_t*) { return group_of<Int8>(w, at); }

  // Half a line, eight outputs: quad by quad, with the number of its first input.
  template <class Dot>
  INLINE void each_quad(const uint8_t* half, Dot dot) {
    dot(_mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(half)), _mm256_set1_epi8(-128)), 0);
  }
};

// M rows by H halves of a block, eight outputs each: as many sums as the registers hold beside operands.
constexpr int halves_for(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : rows <= 4 ? 2 : 1; }

// Where half h of a unit begins, in blocks `stride` bytes long.
INLINE const uint8_t* half_of(const uint8_t* wp, int64_t stride, int h) { return wp + h / 2 * stride + h % 2 * 32; }

// acc += the four products a lane of w and the quad at x. |x| <= 127 and |w| <= 127, so a pair's sum stays within
// 16 bits: nothing saturates. Inline assembly, because gcc loads all rows' quads first and spills the sums.
INLINE void dot4(__m256i& acc, __m256i w, __m256i magnitude, const int8_t* x, __m256i ones) {
  __m256i t;
  asm("vpbroadcastd %[x], %[t]\n\t"
      "vpsignb %[w], %[t], %[t]\n\t"
      "vpmaddubsw %[t], %[magnitude], %[t]\n\t"
      "vpmaddwd %[ones], %[t], %[t]\n\t"
      "vpaddd %[t], %[acc], %[acc]"
      : [acc] "+x"(acc), [t] "=&x"(t)
      : [x] "m"(*reinterpret_cast<const int32_t*>(x)), [w] "x"(w), [magnitude] "x"(magnitude), [ones] "x"(ones));
}

// One group of H halves for M rows; what comes next is prefetched meanwhile.
template <class Format, int M, int H>
INLINE void dot_group(const uint8_t* wp, int64_t stride, int64_t ahead, const int8_t* xp, __m256i dot[M][H]) {
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h) dot[m][h] = _mm256_setzero_si256();
  for (int64_t k = 0; k < kGroup; k += Format::kInputs, wp += 64, xp += Format::kInputs) {
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h) {
      const uint8_t* from = half_of(wp, stride, h);
      if (h % 2 == 0) prefetch(from + ahead);
      Format::each_quad(from, [&](__m256i w, int64_t first) {
        const __m256i magnitude = _mm256_abs_epi8(w);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) dot4(dot[m][h], w, magnitude, xp + m * kGroup + first, ones);
      });
    }
  }
}

// One group of M rows and the four blocks of a unit, on top of `total`.
template <class Format, int M>
void avx2_group(const Linear& w, const Activations& x, const Spread& weights, const Place& place, int64_t row, Totals total) {
  constexpr int H = halves_for(M);
  const int64_t at = place.g * x.padded + row;
  for (int first = 0; first < kItem / 8; first += H) {
    __m256i dot[M][H];
    const uint8_t* wp = half_of(weights.first, weights.stride, first);
    dot_group<Format, M, H>(wp, weights.stride, weights.ahead, x.q + at * kGroup, dot);
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h) {
      const int half = first + h;
      const uint16_t* scales = w.scale + ((place.block + half / 2) * w.groups + place.g) * kBlock + half % 2 * 8;
      prefetch(reinterpret_cast<const uint8_t*>(scales + place.next * kBlock));
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
      const __m256 ws = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {  // as add_group does
        const __m256 scale = _mm256_mul_ps(ws, _mm256_set1_ps(x.scale[at + m]));
        float* to = total[m] + half * 8;
        _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[m][h]), scale, _mm256_loadu_ps(to)));
      }
    }
  }
}

constexpr int kGroupRows = 8;
constexpr int kUnpackingRows = 4;

// One group of up to kGroupRows rows.
template <class Format>
INLINE void add_rows(const Linear& w, const Activations& x, const Spread& weights, const Place& at, int64_t row, int64_t rows,
                     Totals total) {
  using Group = void (*)(const Linear&, const Activations&, const Spread&, const Place&, int64_t, Totals);
  static constexpr Group groups[kGroupRows] = {avx2_group<Format, 1>, avx2_group<Format, 2>, avx2_group<Format, 3>,
                                               avx2_group<Format, 4>, avx2_group<Format, 5>, avx2_group<Format, 6>,
                                               avx2_group<Format, 7>, avx2_group<Format, 8>};
  groups[rows - 1](w, x, weights, at, row, total);
}

// One group of all rows. For few of them weights are unpacked in registers, between the products, so that memory is
// never idle; for more, which arithmetic bounds, once into the first cache.
template <class Format>
INLINE void add_all_rows(const Linear& w, const Activations& x, const Place& at, int64_t first, int64_t rows, Totals total,
                         uint8_t* room) {
  if (rows <= kUnpackingRows) return add_rows<Format>(w, x, group_of<Format>(w, at), at, first, rows, total);
  const Spread weights = Format::unpacked(w, at, room);
  for (int64_t row = 0; row < rows; row += kGroupRows)
    add_rows<Int8>(w, x, weights, at, first + row, rows - row < kGroupRows ? rows - row : kGroupRows, total + row);
}

#elif !defined(__AVX512VNNI__)

// What a product needs of a weight's format; weights4.h has the other one.
struct Int8 {
  static constexpr int64_t kBytes = kGroup * kBlock;  // of one block's group

  INLINE Spread unpacked(const Linear& w, const Place& at, uint8_t*) { return group_of<Int8>(w, at); }
};

constexpr int kPart = 16;
constexpr int kParts = 64 / kPart;  // of a block's sixteen outputs, each as wide as a register
typedef float fpart __attribute__((vector_size(kPart), aligned(4), may_alias));
typedef int32_t ipart __attribute__((vector_size(kPart), aligned(4), may_alias));

// One group of R rows and one block, in float32: a group's products and sums stay below 2^24, so they are exact integers.
template <int R>
void plain_group(const Linear& w, const Activations& x, const uint8_t* wp, int64_t block, int64_t g, int64_t row, Totals total) {
  const int64_t at = g * x.padded + row;
  float xs[R][kGroup];
  for (int r = 0; r < R; ++r)
    for (int64_t k = 0; k < kGroup; ++k) xs[r][k] = x.q[(at + r) * kGroup + k];
  fpart dot[R][kParts] = {};
  for (int64_t k = 0; k < kGroup; k += 4, wp += 64)  // unrolled, or gcc keeps the sums in memory
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const ipart four = *reinterpret_cast<const ipart*>(wp + part * kPart);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const fpart value = __builtin_convertvector((four >> (8 * j)) & 255, fpart);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) dot[r][part] += value * xs[r][k + j];
      }
    }
  const v16 ws = scales_of(w, block, g);
  for (int r = 0; r < R; ++r) {
    float* to = total[r] + block % (kItem / kBlock) * kBlock;
    const v16i whole = __builtin_convertvector(load(reinterpret_cast<const float*>(dot[r])), v16i) + x.sum[at + r];
    store(to, add_group(load(to), whole, ws, x.scale[at + r]));
  }
}

// One group of all rows, unpacked once into the first cache.
template <class Format>
INLINE void add_all_rows(const Linear& w, const Activations& x, const Place& at, int64_t first, int64_t rows, Totals total,
                         uint8_t* room) {
  const Spread weights = Format::unpacked(w, at, room);
  for (int64_t row = 0; row < rows; row += 2)
    for (int64_t b = 0; b < kItem / kBlock; ++b) {
      const auto add = rows - row < 2 ? plain_group<1> : plain_group<2>;
      add(w, x, weights.first + b * weights.stride, at.block + b, at.g, first + row, total + row);
    }
}

#endif

#if !defined(__AVX512VNNI__)

// The four blocks of a unit, group by group: the weights and activations of one stay in the first cache for all rows.
template <class Format>
void item_by_groups(const Linear& w, const Activations& x, int64_t block, const Phase& phase, const Output& y) {
  constexpr int64_t kMost = 64;
  const int64_t end = (w.n + kItem - 1) / kItem * (kItem / kBlock);
  for (int64_t first = 0; first < x.rows; first += kMost) {
    const int64_t rows = x.rows - first < kMost ? x.rows - first : kMost;
    alignas(64) uint8_t room[kGroup * kItem];
    alignas(64) float total[kMost][kItem];
    std::memset(total, 0, rows * sizeof total[0]);
    for (int64_t g = 0; g < w.groups; ++g) {
      Place at{block, g, 1};
      if (g + 1 == w.groups) {
        const int64_t coming = phase.coming() * (kItem / kBlock);
        at.next = coming < end ? (coming - block) * w.groups - g : 0;
      }
      add_all_rows<Format>(w, x, at, first, rows, total, room);
    }
    for (int64_t row = 0; row < rows; ++row)
      for (int b = 0; b < kItem / kBlock; ++b) put(w, y, first + row, block + b, load(total[row] + b * kBlock));
  }
}

#endif

template <class Format>
INLINE void linear_item(const Linear& w, const Activations& x, int64_t item, const Phase& phase, const Output& y, bool amx) {
  const int64_t block = item * (kItem / kBlock);
#if defined(__AMX_INT8__)
  if (amx && x.rows >= kAmxRows) return amx_item<Format>(w, x, block, y);
#endif
  (void)amx;
#if defined(__AVX512VNNI__)
  (void)phase;
  vnni_item<Format>(w, x, block, y);
#else
  item_by_groups<Format>(w, x, block, phase, y);
#endif
}

// Quantizes one row whose sixteen values from `i` on are `value(i)`: symmetric, one scale per group.
template <class Value>
INLINE void quantize_groups(const Activations& x, int64_t row, int64_t k, int64_t first, int64_t last, Value value) {
  for (int64_t g = first; g < last; ++g) {
    const int64_t count = k - g * kGroup;
    v16 v[kGroup / 16], top = {};
    for (int64_t i = 0; i < kGroup / 16; ++i) {
      v[i] = i * 16 < count ? value(g * kGroup + i * 16) : v16{};
      top = vmax(top, vmax(v[i], -v[i]));
    }
    const float amax = largest(top), inverse = amax > 0.f ? 127.f / amax : 0.f;
    int8_t* q = x.q + (g * x.padded + row) * kGroup;
    v16i total = {};
    for (int64_t i = 0; i < kGroup / 16; ++i) {
      const v16 rounded = (v[i] * inverse + 12582912.f) - 12582912.f;  // nearest even
      const v16i n = __builtin_convertvector(rounded, v16i);
      store_bytes(q + i * 16, n);
      total += n;
    }
    x.scale[g * x.padded + row] = amax / 127.f;
    x.sum[g * x.padded + row] = -128 * sum(total);
  }
}

// One group of a row of a float weight [n, k], zeros where it has none.
INLINE void load_group(const void* w, Dtype type, int64_t n, int64_t k, int64_t row, int64_t g, v16 v[kGroup / 16]) {
  const int64_t first = row * k + g * kGroup, count = row < n ? k - g * kGroup : 0;
  for (int64_t i = 0; i < kGroup; i += 16) {
    v[i / 16] = v16{};
    if (i < count) v[i / 16] = type == Dtype::f32 ? load(static_cast<const float*>(w) + first + i)
                                                  : from_bf16(static_cast<const uint16_t*>(w) + first + i);
  }
}

// Packs one block of 16 rows of a float weight [n, k]; scales are rounded to bfloat16 before they are used.
void pack_block(const void* w, Dtype type, int64_t n, int64_t k, int64_t block, uint8_t* packed, uint16_t* scale) {
  const int64_t groups = (k + kGroup - 1) / kGroup;
  packed += block * groups * kGroup * kBlock;
  for (int64_t g = 0; g < groups; ++g, packed += kGroup * kBlock) {
    uint8_t rows[kBlock][kGroup];
    for (int64_t lane = 0; lane < kBlock; ++lane) {
      v16 v[kGroup / 16], top = {};
      load_group(w, type, n, k, block * kBlock + lane, g, v);
      for (const v16 x : v) top = vmax(top, vmax(x, -x));
      const uint16_t s = to_bf16(largest(top) / 127.f);
      const float inverse = s ? 1.f / widen(s) : 0.f;
      scale[(block * groups + g) * kBlock + lane] = s;
      for (int64_t i = 0; i < kGroup; ++i) {
        const float q = (v[i / 16][i % 16] * inverse + 12582912.f) - 12582912.f;  // nearest even
        rows[lane][i] = static_cast<uint8_t>(static_cast<int>(q > 127.f ? 127.f : (q < -127.f ? -127.f : q)) + 128);
      }
    }
    for (int64_t quad = 0; quad < kGroup / 4; ++quad)
      for (int64_t lane = 0; lane < kBlock; ++lane) std::memcpy(packed + (quad * kBlock + lane) * 4, rows[lane] + quad * 4, 4);
  }
}

}  // namespace
}  // namespace tokentape
