// What the operators (ops.cpp) and the kernels (step.cpp, compiled once per instruction set) share.
// Plain data only: a std:: template instantiated here could be emitted with AVX-512 in one object and
// be picked by the linker for a machine that has none.
#pragma once
#include <atomic>
#include <cstdint>

namespace tokentape {

constexpr int64_t kGroup = 128;  // weights and activations share one scale per 128 inputs
constexpr int64_t kBlock = 16;   // outputs interleaved in one packed block
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kPhasesPerLayer = 10;  // of Kernels::forward
constexpr int64_t kItem = 64;    // outputs of one unit of work; N is padded to it

// What the codes of 4-bit weights stand for: Lloyd-Max levels of trained weights over their group's largest one, whose
// scale has its sign. Such values are near-normal, so levels lie closer around zero; integers, so that unpacking is exact.
constexpr int64_t kLevels = 16;
alignas(16) constexpr int8_t kLevel[kLevels] = {-112, -83, -63, -47, -33, -20, -9, 0, 8, 17, 28, 40, 54, 71, 93, 127};

// y = x W^T + bias. weight: of 8 bits [N/16, K/4, 16, 4] bytes, each w + 128 (the unsigned side of the
// dot-product instructions), of 4 bits [N/16, K/8, 16, 4], each two codes (weights4.h); scale: [N/16, K/128, 16]
// bfloat16; N and K are padded with zeros.
struct Linear {
  const uint8_t* weight = nullptr;
  const uint16_t* scale = nullptr;
  const float* bias = nullptr;
  int64_t n = 0, k = 0, groups = 0, bits = 8;
};

// Activations quantized per row and group. q: [groups, padded, 128], so that the rows of a group lie together;
// scale, sum: [groups, padded], sum = -128 * (sum of q), which takes the weights' offset out of the product again.
struct Activations {
  int8_t* q;
  float* scale;
  int32_t* sum;
  int64_t rows, padded, groups;
};

struct Layer {
  const float *input_norm, *q_norm, *k_norm, *post_norm;  // q_norm and k_norm may be null
  Linear qkv, o, gate_up, down;
};

enum class Activation : int64_t { silu = 0, gelu_tanh = 1 };
enum class Dtype : int64_t { f32 = 0, bf16 = 1 };

struct Model {
  int64_t hidden, intermediate, heads, kv_heads, head_dim, rope_dim, max_position, vocab, num_layers;
  float eps, attention_scale, embed_scale;
  Activation activation;
  const void* embed;  // [vocab, hidden]
  Dtype embed_dtype;
  const float *cos, *sin, *final_norm;  // [max_position, rope_dim / 2], [hidden]
  const Layer* layers;
  Linear head;
};

// One ragged pass. Token t belongs to a row of the block table, sits at `positions[t]` there and sees
// the keys 0..positions[t]. Caches: [blocks, kv_heads, block_size, head_dim], one pair a layer.
struct Pass {
  int64_t num_tokens, num_wanted, block_size, blocks_per_row;
  const int64_t *tokens, *positions, *rows, *block_table, *wanted;
  void *const *k_cache, *const *v_cache;
  Dtype kv_dtype;
  float *logits, *attn_entropy, *hidden;  // [wanted, vocab], [wanted], [wanted, hidden]: behind the final norm
};

// What a router needs of one position's logits. Top tokens come most likely first, ties by lowest id; `norm` is the
// log of the sum of exponentials, `entropy` that of the softmax in nats. ids, logits: [k], `k` at most kMostTop.
constexpr int64_t kMostTop = 64;
struct Summary {
  int64_t* ids;
  float* logits;
  float *norm, *entropy;
};

struct Scratch {
  float *h, *wide, *narrow, *scores, *entropy;  // entropy: [tokens, heads] of the last layer
  int64_t scores_per_thread;
  Activations x;
};

// Units of work of one phase, handed out one by one. A phase ends when its units are done, not when every
// thread has arrived: a thread whose core is taken by a neighbour holds up at most the unit in its hands.
struct alignas(64) Phase {
  std::atomic<int64_t> next{0};
  std::atomic<int> done{0};
  int64_t take();
  int64_t coming() const { return next.load(std::memory_order_relaxed); }  // likely this thread's next unit
  void finish(int64_t units, int64_t count);  // returns once all `count` are done
};

// One thread of a team walking through the phases of a pass.
struct Worker {
  Phase* phase;
  int thread, threads;
};

// One instruction set's kernels; each function is called by every thread of the team.
struct Kernels {
  void (*enter)(bool amx);
  void (*leave)(bool amx);
  void (*pack)(Worker, const void* weight, Dtype, int64_t n, int64_t k, int64_t bits, uint8_t* packed, uint16_t* scale);
  void (*linear)(Worker, const Linear&, const float* x, Activations, float* y, bool amx);
  void (*attention)(Worker&, const Model&, const Pass&, int64_t layer, const float* q,
                    int64_t q_stride, float* out, float* entropy, Scratch&);
  void (*forward)(Worker, const Model&, const Pass&, Scratch&, bool amx);
  void (*summarize)(Worker, const float* logits, int64_t stride, int64_t rows, int64_t vocab, int64_t k, Summary first);
  int64_t (*read)(Worker, const uint8_t* bytes, int64_t count);
  double (*peak)(bool amx, int64_t repeats);  // multiply-adds done, for timing
};

namespace portable { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }

}  // namespace tokentape
