// Sixteen float lanes, the same bits on every instruction set: each function is a fixed sequence of IEEE
// operations, fused multiply-add only where it is written, and sums are trees of fixed shape.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tokentape {
namespace {

typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t v16i __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t v16u __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t v16h __attribute__((vector_size(32), aligned(2), may_alias));
#define INLINE static inline __attribute__((always_inline))

INLINE v16 load(const float* p) { return *reinterpret_cast<const v16*>(p); }
INLINE void store(float* p, v16 v) { *reinterpret_cast<v16*>(p) = v; }
INLINE v16 splat(float x) { return v16{} + x; }
INLINE v16 vmax(v16 a, v16 b) { return a > b ? a : b; }
INLINE v16 vmin(v16 a, v16 b) { return a < b ? a : b; }

#if defined(__AVX2__)
typedef __m256 half_f __attribute__((aligned(4), may_alias));
INLINE half_f& at(v16& v, int half) { return reinterpret_cast<half_f*>(&v)[half]; }
#endif

INLINE v16 fma(v16 a, v16 b, v16 c) {
#if defined(__AVX512F__)
  return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  for (int half = 0; half < 2; ++half)
    at(c, half) = _mm256_fmadd_ps(at(a, half), at(b, half), at(c, half));
  return c;
#else
  for (int i = 0; i < 16; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

INLINE v16 from_bf16(const uint16_t* p) {
  return (v16)(__builtin_convertvector(*reinterpret_cast<const v16h*>(p), v16u) << 16);
}

INLINE uint16_t to_bf16(float x) {  // round to nearest even; NaN stays NaN
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

INLINE float widen(uint16_t b) {
  uint32_t u = static_cast<uint32_t>(b) << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

// Lane i of the result is the sum of a[i]'s lanes, for sixteen vectors at once.
INLINE v16 sum_each(v16 a[16]) {
  for (int half = 8; half >= 1; half /= 2)
    for (int i = 0; i < half; ++i) {
      v16 x = a[i], y = a[i + half];
      const v16i even = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
      const v16i odd = {1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31};
      const v16i lo2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
      const v16i hi2 = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
      const v16i lo4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
      const v16i hi4 = {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31};
      const v16i lo8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
      const v16i hi8 = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
      if (half == 8) a[i] = __builtin_shuffle(x, y, lo8) + __builtin_shuffle(x, y, hi8);
      if (half == 4) a[i] = __builtin_shuffle(x, y, lo4) + __builtin_shuffle(x, y, hi4);
      if (half == 2) a[i] = __builtin_shuffle(x, y, lo2) + __builtin_shuffle(x, y, hi2);
      if (half == 1) a[i] = __builtin_shuffle(x, y, even) + __builtin_shuffle(x, y, odd);
    }
  return a[0];
}

INLINE float sum(v16 v) {
  float t[16];
  store(t, v);
  for (int half = 8; half >= 1; half /= 2)
    for (int i = 0; i < half; ++i) t[i] += t[i + half];
  return t[0];
}

INLINE float largest(v16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#elif defined(__AVX2__)
  __m256 m = _mm256_max_ps(at(v, 0), at(v, 1));
  m = _mm256_max_ps(m, _mm256_permute2f128_ps(m, m, 1));
  m = _mm256_max_ps(m, _mm256_shuffle_ps(m, m, 0x4e));
  return _mm256_cvtss_f32(_mm256_max_ps(m, _mm256_shuffle_ps(m, m, 0xb1)));
#else
  float m = v[0];
  for (int i = 1; i < 16; ++i) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

INLINE int32_t sum(v16i v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t total = 0;
  for (int i = 0; i < 16; ++i) total += v[i];
  return total;
#endif
}

INLINE void store_bytes(int8_t* p, v16i v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
#else
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(v[i]);
#endif
}

// e^x to about 1e-7 relative (Cephes' polynomial), x clamped to [-87, 88].
INLINE v16 exponential(v16 x) {
  x = vmax(vmin(x, splat(88.f)), splat(-87.f));
  const v16 shifted = x * 1.44269504f + 12582912.f;  // rounds to an integer in the low mantissa bits
  const v16 n = shifted - 12582912.f;
  v16 r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  v16 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.f;
  return p * (v16)(((v16i)shifted - 0x4B400000 + 127) << 23);
}

}  // namespace
}  // namespace tokentape
