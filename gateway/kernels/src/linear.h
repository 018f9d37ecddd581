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

INLINE const uint8_t* weights_of(const Linear& w, int64_t block) {
  return w.weight + block * w.groups * kGroup * kBlock;
}

INLINE v16 scales_of(const Linear& w, int64_t block, int64_t g) {
  return from_bf16(w.scale + (block * w.groups + g) * kBlock);
}

// The scale of both sides first, then one fused step: the order every path keeps.
INLINE v16 add_group(v16 total, v16i dot, v16 w_scale, float x_scale) {
  return fma(__builtin_convertvector(dot, v16), w_scale * x_scale, total);
}

#if defined(__AVX512VNNI__)

// M rows by B blocks. Inline assembly keeps the accumulators in registers: gcc spills them around the
// intrinsic, at half the speed.
INLINE void dot4(v16i& acc, __m512i w, __m512i x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
}

template <int M, int B>
void tile(const Linear& w, const Activations& x, int64_t block, int64_t row, const Output& y) {
  v16 total[M][B] = {};
  const int64_t width = w.groups * kGroup, stride = width * kBlock;
  const uint8_t* wp = weights_of(w, block);
  const int8_t* xp = x.q + row * width;
  for (int64_t g = 0; g < w.groups; ++g) {
    v16i dot[M][B];
    for (int m = 0; m < M; ++m)
      for (int b = 0; b < B; ++b) dot[m][b] = v16i{} + x.sum[g * x.padded + row + m];
    for (int64_t k = 0; k < kGroup; k += 4, wp += 64, xp += 4) {
      __m512i wv[B];
      for (int b = 0; b < B; ++b) wv[b] = _mm512_loadu_si512(wp + b * stride);
      for (int m = 0; m < M; ++m) {
        int32_t four;
        std::memcpy(&four, xp + m * width, 4);
        const __m512i xv = _mm512_set1_epi32(four);
        for (int b = 0; b < B; ++b) dot4(dot[m][b], wv[b], xv);
      }
    }
    for (int b = 0; b < B; ++b) {
      const v16 ws = scales_of(w, block + b, g);
      for (int m = 0; m < M; ++m)
        total[m][b] = add_group(total[m][b], dot[m][b], ws, x.scale[g * x.padded + row + m]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int b = 0; b < B; ++b) put(w, y, row + m, block + b, total[m][b]);
}

void vnni_item(const Linear& w, const Activations& x, int64_t block, const Output& y) {
  int64_t row = 0;
  for (; row + 6 <= x.rows; row += 6) tile<6, 4>(w, x, block, row, y);
  switch (x.rows - row) {
    case 5: return tile<5, 4>(w, x, block, row, y);
    case 4: return tile<4, 4>(w, x, block, row, y);
    case 3: return tile<3, 4>(w, x, block, row, y);
    case 2: return tile<2, 4>(w, x, block, row, y);
    case 1: return tile<1, 4>(w, x, block, row, y);
  }
}

#if defined(__AMX_INT8__)

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Up to 64 rows by two blocks, 16 rows at a time: tiles 0-1 are products, 2-3 activations, 4-7 weights.
// The integers of one step are scaled while the tile unit works on the next.
void amx_tile(const Linear& w, const Activations& x, int64_t block, int64_t row, int64_t rows, const Output& y) {
  alignas(64) float total[64][32] = {};
  alignas(64) int32_t dot[2][16][32];
  const int64_t width = w.groups * kGroup, stride = width * kBlock, steps = (rows + 15) / 16;
  const uint8_t* wp = weights_of(w, block);
  const int8_t* xp = x.q + row * width;
  const auto scale_step = [&](int64_t g, int64_t step) {
    const v16 ws0 = scales_of(w, block, g), ws1 = scales_of(w, block + 1, g);
    const int64_t base = g * x.padded + row + step * 16, last = rows - step * 16 < 16 ? rows - step * 16 : 16;
    for (int64_t r = 0; r < last; ++r) {
      const int32_t(&d)[32] = dot[step & 1][r];
      float(&t)[32] = total[step * 16 + r];
      const int32_t offset = x.sum[base + r];
      const v16i d0 = *reinterpret_cast<const v16i*>(d) + offset, d1 = *reinterpret_cast<const v16i*>(d + 16) + offset;
      store(t, add_group(load(t), d0, ws0, x.scale[base + r]));
      store(t + 16, add_group(load(t + 16), d1, ws1, x.scale[base + r]));
    }
  };
  for (int64_t g = 0; g < w.groups; ++g, wp += kGroup * kBlock, xp += kGroup) {
    _tile_loadd(4, wp, 64);
    _tile_loadd(5, wp + 1024, 64);
    _tile_loadd(6, wp + stride, 64);
    _tile_loadd(7, wp + stride + 1024, 64);
    for (int64_t step = 0; step < steps; ++step) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_loadd(2, xp + step * 16 * width, width);
      _tile_loadd(3, xp + step * 16 * width + 64, width);
      _tile_dpbsud(0, 2, 4);
      _tile_dpbsud(1, 2, 6);
      _tile_dpbsud(0, 3, 5);
      _tile_dpbsud(1, 3, 7);
      if (step > 0) scale_step(g, step - 1);
      _tile_stored(0, dot[step & 1], 128);
      _tile_stored(1, dot[step & 1][0] + 16, 128);
    }
    scale_step(g, steps - 1);
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int b = 0; b < 2; ++b) put(w, y, row + r, block + b, load(total[r] + 16 * b));
}

void amx_item(const Linear& w, const Activations& x, int64_t block, const Output& y) {
  for (int64_t row = 0; row < x.rows; row += 64)
    for (int64_t b = 0; b < kItem / kBlock; b += 2)
      amx_tile(w, x, block + b, row, x.rows - row < 64 ? x.rows - row : 64, y);
}

constexpr int64_t kAmxRows = 3;  // fewer rows are bound by memory either way

#endif
#endif

#if !defined(__AVX512VNNI__)

// Written so that compilers find the 16-bit multiply-add; exact in int32.
void plain_item(const Linear& w, const Activations& x, int64_t block, const Output& y) {
  const int64_t width = w.groups * kGroup;
  for (int64_t b = block; b < block + kItem / kBlock; ++b)
    for (int64_t row = 0; row < x.rows; ++row) {
      const uint8_t* wp = weights_of(w, b);
      const int8_t* xp = x.q + row * width;
      v16 total = {};
      for (int64_t g = 0; g < w.groups; ++g) {
        int32_t pair[32] = {};
        for (int64_t k = 0; k < kGroup; k += 4, wp += 64, xp += 4) {
          int16_t xs[64];
          for (int i = 0; i < 64; ++i) xs[i] = xp[i & 3];
          for (int i = 0; i < 32; ++i)
            pair[i] += static_cast<int16_t>(wp[2 * i]) * xs[2 * i] + static_cast<int16_t>(wp[2 * i + 1]) * xs[2 * i + 1];
        }
        v16i dot = v16i{} + x.sum[g * x.padded + row];
        for (int i = 0; i < 16; ++i) dot[i] += pair[2 * i] + pair[2 * i + 1];
        total = add_group(total, dot, scales_of(w, b, g), x.scale[g * x.padded + row]);
      }
      put(w, y, row, b, total);
    }
}

#endif

INLINE void linear_item(const Linear& w, const Activations& x, int64_t item, const Output& y, bool amx) {
  const int64_t block = item * (kItem / kBlock);
#if defined(__AMX_INT8__)
  if (amx && x.rows >= kAmxRows) return amx_item(w, x, block, y);
#endif
#if defined(__AVX512VNNI__)
  (void)amx;
  return vnni_item(w, x, block, y);
#else
  (void)amx;
  return plain_item(w, x, block, y);
#endif
}

// Quantizes one row whose sixteen values from `i` on are `value(i)`: symmetric, one scale per group.
template <class Value>
INLINE void quantize_groups(const Activations& x, int64_t row, int64_t k, int64_t first, int64_t last, Value value) {
  for (int64_t g = first; g < last; ++g) {
    alignas(64) float t[kGroup] = {};
    const int64_t count = k - g * kGroup < kGroup ? k - g * kGroup : kGroup;
    v16 top = {};
    for (int64_t i = 0; i < count; i += 16) {
      const v16 v = value(g * kGroup + i);
      store(t + i, v);
      top = vmax(top, vmax(v, -v));
    }
    const float amax = largest(top), inverse = amax > 0.f ? 127.f / amax : 0.f;
    int8_t* q = x.q + row * x.groups * kGroup + g * kGroup;
    int32_t total = 0;
    for (int i = 0; i < kGroup; ++i) {
      const float rounded = (t[i] * inverse + 12582912.f) - 12582912.f;  // nearest even
      const int32_t n = static_cast<int32_t>(rounded);
      q[i] = static_cast<int8_t>(n);
      total += n;
    }
    x.scale[g * x.padded + row] = amax / 127.f;
    x.sum[g * x.padded + row] = -128 * total;
  }
}

// Packs one block of 16 rows of a float weight [n, k]; scales are rounded to bfloat16 first.
INLINE float weight_at(const void* w, Dtype type, int64_t i) {
  return type == Dtype::f32 ? static_cast<const float*>(w)[i] : widen(static_cast<const uint16_t*>(w)[i]);
}

void pack_block(const void* w, Dtype type, int64_t n, int64_t k, int64_t block, uint8_t* packed, uint16_t* scale) {
  const int64_t groups = (k + kGroup - 1) / kGroup;
  packed += block * groups * kGroup * kBlock;
  for (int64_t lane = 0; lane < kBlock; ++lane)
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t row = block * kBlock + lane;
      const int64_t count = row < n ? (k - g * kGroup < kGroup ? k - g * kGroup : kGroup) : 0;
      float t[kGroup] = {}, amax = 0.f;
      for (int64_t i = 0; i < count; ++i) {
        t[i] = weight_at(w, type, row * k + g * kGroup + i);
        amax = t[i] > amax ? t[i] : (-t[i] > amax ? -t[i] : amax);
      }
      const uint16_t s = to_bf16(amax / 127.f);
      scale[(block * groups + g) * kBlock + lane] = s;
      const float inverse = s ? 1.f / widen(s) : 0.f;
      for (int64_t i = 0; i < kGroup; ++i) {
        float q = (t[i] * inverse + 12582912.f) - 12582912.f;
        q = q > 127.f ? 127.f : (q < -127.f ? -127.f : q);
        packed[((g * kGroup + i) / 4 * kBlock + lane) * 4 + i % 4] = static_cast<uint8_t>(static_cast<int>(q) + 128);
      }
    }
}

}  // namespace
}  // namespace tokentape
