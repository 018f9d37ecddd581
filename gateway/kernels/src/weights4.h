// Weights of four bits: codes of sixteen int8 levels. Unpacked they are weights of eight bits, so every path
// computes with the same integers; a bfloat16 scale per output and group of 128 inputs, as with eight bits.
#pragma once
#include "linear.h"

namespace tokentape {
namespace {

// kLevel as the packed weights of eight bits hold it.
alignas(16) constexpr uint8_t kLevelByte[kLevels] = {16,  45,  65,  81,  95,  108, 119, 128,
                                                     136, 145, 156, 168, 182, 199, 221, 255};

constexpr int64_t kGroupBytes4 = kGroup * kBlock / 2;  // one block's group

#if defined(__AVX512BW__)

struct Pair {
  __m512i low, high;  // two quads of inputs
};

INLINE Pair unpack_pair(const uint8_t* p) {
  const __m512i levels = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kLevelByte)));
  const __m512i nibble = _mm512_set1_epi8(15), codes = _mm512_loadu_si512(p);
  return {_mm512_shuffle_epi8(levels, _mm512_and_si512(codes, nibble)),
          _mm512_shuffle_epi8(levels, _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble))};
}

INLINE void unpack(const uint8_t* from, uint8_t* to) {
  const Pair pair = unpack_pair(from);
  _mm512_storeu_si512(to, pair.low);
  _mm512_storeu_si512(to + 64, pair.high);
}

#elif defined(__AVX2__)

INLINE void unpack(const uint8_t* from, uint8_t* to) {
  const __m256i levels = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kLevelByte)));
  const __m256i nibble = _mm256_set1_epi8(15);
  for (int64_t i = 0; i < 64; i += 32) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm256_shuffle_epi8(levels, _mm256_and_si256(codes, nibble)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 64 + i), _mm256_shuffle_epi8(levels, high));
  }
}

#else

INLINE void unpack(const uint8_t* from, uint8_t* to) {
  for (int64_t i = 0; i < 64; ++i) {
    to[i] = kLevelByte[from[i] & 15];
    to[64 + i] = kLevelByte[from[i] >> 4];
  }
}

#endif

#if defined(__AVX512VNNI__)

// What the tiles need of a weight's format.
struct Int4 {
  static constexpr int64_t kBytes = kGroupBytes4;

  template <int M>
  INLINE void dot_group(const uint8_t* w0, const uint8_t* w1, const int8_t* xp, const int32_t* sum, v16i dot[M][2]) {
    for (int m = 0; m < M; ++m) dot[m][0] = dot[m][1] = v16i{} + sum[m];
    for (int64_t k = 0; k < kGroup; k += 8, w0 += 64, w1 += 64, xp += 8) {
      prefetch(w0 + kBytes);
      prefetch(w1 + kBytes);
      const Pair a = unpack_pair(w0), b = unpack_pair(w1);
      for (int m = 0; m < M; ++m) {
        dot4(dot[m][0], a.low, quad(xp + m * kGroup));
        dot4(dot[m][1], b.low, quad(xp + m * kGroup));
      }
      for (int m = 0; m < M; ++m) {
        dot4(dot[m][0], a.high, quad(xp + m * kGroup + 4));
        dot4(dot[m][1], b.high, quad(xp + m * kGroup + 4));
      }
    }
  }

  // One group of two blocks for the tile unit, unpacked while it works on the one before.
  struct Tiles {
    uint8_t room[2][2][2 * kGroupBytes4];
    const uint8_t *first, *second, *next[2];
    int now = 1;

    void start(const uint8_t* w0, const uint8_t* w1) {
      next[0] = w0, next[1] = w1;
      for (int64_t i = 0; i < 32; ++i) ahead(i);
    }

    void turn(const uint8_t*, const uint8_t*, const uint8_t* next0, const uint8_t* next1) {
      now = !now;
      first = room[now][0], second = room[now][1];
      next[0] = next0, next[1] = next1;
    }

    void ahead(int64_t i) {
      if (!next[0]) return;
      const uint8_t* from = next[i & 1] + i / 2 * 64;
      prefetch(from + kBytes);
      unpack(from, room[!now][i & 1] + i / 2 * 128);
    }
  };
};

#endif

#if !defined(__AVX512VNNI__)

// What a product needs of a weight's format.
struct Int4 {
  static constexpr int64_t kBytes = kGroupBytes4;

  // A group unpacked where the first cache holds it.
  INLINE Spread unpacked(const Linear& w, const Place& at, uint8_t* room) {
    const Spread packed = group_of<Int4>(w, at);
    for (int64_t b = 0; b < kItem / kBlock; ++b) {
      const uint8_t* from = packed.first + b * packed.stride;
      for (int64_t i = 0; i < kBytes; i += 64) {
        __builtin_prefetch(from + i + packed.ahead);
        unpack(from + i, room + b * Int8::kBytes + 2 * i);
      }
    }
    return {room, Int8::kBytes, 0};
  }

#if defined(__AVX2__)
  static constexpr int64_t kInputs = 8;  // of a line

  template <class Dot>
  INLINE void each_quad(const uint8_t* half, Dot dot) {
    const __m256i levels = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kLevel)));
    const __m256i nibble = _mm256_set1_epi8(15), codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(half));
    dot(_mm256_shuffle_epi8(levels, _mm256_and_si256(codes, nibble)), 0);
    dot(_mm256_shuffle_epi8(levels, _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble)), 4);
  }
#endif
};

#endif

// One unit of work of a weight in either format; phase: whose unit it is.
INLINE void any_item(const Linear& w, const Activations& x, int64_t item, const Phase& phase, const Output& y, bool amx) {
  if (w.bits == 8) return linear_item<Int8>(w, x, item, phase, y, amx);
  linear_item<Int4>(w, x, item, phase, y, amx);
}

struct Coded {
  v16 value, code;
};

// The nearest level of each lane and its number.
INLINE Coded nearest_level(v16 x) {
  Coded found = {splat(kLevel[0]), {}};
  for (int64_t i = 1; i < kLevels; ++i) {
    const v16 above = x > splat((kLevel[i] + kLevel[i - 1]) / 2.f) ? splat(1.f) : v16{};
    found.value += above * static_cast<float>(kLevel[i] - kLevel[i - 1]);
    found.code += above;
  }
  return found;
}

// Packs one block of 16 rows of a float weight [n, k]. Of a few scales that bring a group's largest value near the
// top level, the one of least squared error; a byte holds the codes of one quad (low) and of the next (high).
void pack_block4(const void* w, Dtype type, int64_t n, int64_t k, int64_t block, uint8_t* packed, uint16_t* scale) {
  constexpr float kTops[] = {1.f, 1.06f, .94f, .88f, .82f, .76f};  // what the top level stands for, over the largest
  const int64_t groups = (k + kGroup - 1) / kGroup;
  packed += block * groups * kGroupBytes4;
  for (int64_t g = 0; g < groups; ++g, packed += kGroupBytes4) {
    uint8_t rows[kBlock][kGroup];
    for (int64_t lane = 0; lane < kBlock; ++lane) {
      v16 v[kGroup / 16];
      load_group(w, type, n, k, block * kBlock + lane, g, v);
      v16 top = {}, bottom = {};
      for (const v16 x : v) top = vmax(top, x), bottom = vmax(bottom, -x);
      const float most = largest(top), least = largest(bottom);
      const float unit = (most >= least ? most : -least) / kLevel[kLevels - 1];
      uint16_t best = 0;
      float best_error = -1.f;
      for (const float factor : kTops) {
        const uint16_t s = to_bf16(unit * factor);
        const float step = widen(s), inverse = s ? 1.f / step : 0.f;
        v16 error = {};
        for (const v16 x : v) {
          const v16 off = nearest_level(x * inverse).value * step - x;
          error = fma(off, off, error);
        }
        const float total = sum(error);
        if (best_error < 0.f || total < best_error) best = s, best_error = total;
      }
      const float inverse = best ? 1.f / widen(best) : 0.f;
      scale[(block * groups + g) * kBlock + lane] = best;
      for (int64_t i = 0; i < kGroup / 16; ++i) {
        const v16 code = nearest_level(v[i] * inverse).code;
        for (int64_t j = 0; j < 16; ++j) rows[lane][i * 16 + j] = static_cast<uint8_t>(code[j]);
      }
    }
    for (int64_t pair = 0; pair < kGroup / 8; ++pair)
      for (int64_t lane = 0; lane < kBlock; ++lane)
        for (int64_t j = 0; j < 4; ++j) {
          const uint8_t *quad = rows[lane] + pair * 8;
          packed[(pair * kBlock + lane) * 4 + j] = static_cast<uint8_t>(quad[j] | quad[j + 4] << 4);
        }
  }
}

}  // namespace
}  // namespace tokentape
