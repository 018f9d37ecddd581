// The operators as torch sees them: shapes are checked here, once; step.cpp trusts them.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <omp.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <mutex>

#include "kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tokentape {

int64_t Phase::take() { return next.fetch_add(1, std::memory_order_relaxed); }

// A short spin, then sleep: the last unit may be on a core that is shared.
void Phase::finish(int64_t units, int64_t count) {
  const int all = static_cast<int>(count), mine = static_cast<int>(units);
  if (mine > 0 && done.fetch_add(mine, std::memory_order_acq_rel) + mine == all) done.notify_all();
  for (int spin = 0; spin < 300; ++spin) {
    if (done.load(std::memory_order_acquire) == all) return;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  for (int seen; (seen = done.load(std::memory_order_acquire)) != all;) done.wait(seen, std::memory_order_acquire);
}

namespace {

using at::Tensor;

struct Path {
  const char* name;
  const Kernels* kernels;
  bool amx;
};

#if defined(__x86_64__)
bool amx_allowed() {
#if defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const unsigned tile = 1u << 24, int8 = 1u << 25;
  if ((d & tile) == 0 || (d & int8) == 0) return false;
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
#else
  return false;
#endif
}
#endif

std::vector<Path> detect() {
  std::vector<Path> found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
    if (amx_allowed()) found.push_back({"amx", &avx512::kernels, true});
    found.push_back({"vnni", &avx512::kernels, false});
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back({"avx2", &avx2::kernels, false});
#endif
  found.push_back({"portable", &portable::kernels, false});
  return found;
}

const std::vector<Path>& paths() {
  static const std::vector<Path> found = detect();
  return found;
}

Path& path() {
  static Path chosen = paths().front();
  return chosen;
}

std::vector<std::string> path_names() {
  std::vector<std::string> names;
  for (const Path& p : paths()) names.emplace_back(p.name);
  return names;
}

void use_path(const std::string& name) {
  for (const Path& p : paths())
    if (name == p.name) {
      path() = p;
      return;
    }
  TORCH_CHECK(false, "this processor has no kernel path ", name);
}

// Runs `body(kernels, worker)`, which walks through `phases` phases, on as many threads as torch uses.
template <class Body>
void on_team(const Path& chosen, int64_t phases, Body body) {
  std::vector<Phase> work(phases);
#pragma omp parallel num_threads(at::get_num_threads())
  {
    chosen.kernels->enter(chosen.amx);
    body(*chosen.kernels, Worker{work.data(), omp_get_thread_num(), omp_get_num_threads()});
    chosen.kernels->leave(chosen.amx);
  }
}

Dtype dtype_of(const Tensor& t, const char* what) {
  TORCH_CHECK(t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16, what, " must be float32 or bfloat16");
  return t.scalar_type() == at::kFloat ? Dtype::f32 : Dtype::bf16;
}

const float* floats(const Tensor& t, int64_t count, const char* what) {
  TORCH_CHECK(t.scalar_type() == at::kFloat && t.is_contiguous() && t.numel() == count, what, " must be ", count,
              " contiguous float32 values");
  return t.const_data_ptr<float>();
}

const float* floats_or_null(const Tensor& t, int64_t count, const char* what) {
  return t.numel() == 0 ? nullptr : floats(t, count, what);
}

const int64_t* indices(const Tensor& t, int64_t count, int64_t limit, const char* what) {
  TORCH_CHECK(t.scalar_type() == at::kLong && t.is_contiguous() && t.numel() == count, what, " must be ", count,
              " contiguous int64 values");
  const int64_t* values = t.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i)
    TORCH_CHECK(values[i] >= 0 && values[i] < limit, what, "[", i, "] = ", values[i], " is outside 0..", limit - 1);
  return values;
}

Linear linear_of(const Tensor& weight, const Tensor& scale, const Tensor& bias, int64_t n, int64_t k) {
  const int64_t blocks = (n + kItem - 1) / kItem * (kItem / kBlock), groups = (k + kGroup - 1) / kGroup;
  TORCH_CHECK(k % 16 == 0, "packed weights need a multiple of 16 inputs, not ", k);
  const int64_t values = blocks * groups * kGroup * kBlock, bits = weight.numel() == values ? 8 : 4;
  TORCH_CHECK(weight.scalar_type() == at::kByte && weight.is_contiguous() && weight.numel() * 8 == values * bits && scale.scalar_type() == at::kBFloat16 &&
                  scale.is_contiguous() && scale.numel() == blocks * groups * kBlock,
              "not a packed weight of ", n, " by ", k);
  return {weight.const_data_ptr<uint8_t>(), static_cast<const uint16_t*>(scale.const_data_ptr()),
          floats_or_null(bias, n, "bias"), n, k, groups, bits};
}

// Room for quantized activations; rows are padded to whole tiles.
struct Quantized {
  Tensor q, scale, sum;
  Quantized() = default;
  Quantized(int64_t rows, int64_t groups)
      : q(at::empty({groups, (rows + 63) / 64 * 64, kGroup}, at::kChar)),
        scale(at::empty({groups, (rows + 63) / 64 * 64}, at::kFloat)),
        sum(at::empty({groups, (rows + 63) / 64 * 64}, at::kInt)) {}
  Activations view(int64_t rows, int64_t groups) const {
    return {q.data_ptr<int8_t>(), scale.data_ptr<float>(), sum.data_ptr<int32_t>(), rows, (rows + 63) / 64 * 64, groups};
  }
};

std::tuple<Tensor, Tensor> quantize_weight(const Tensor& weight, int64_t bits) {
  TORCH_CHECK(bits == 8 || bits == 4, "weights are packed in 8 or 4 bits, not ", bits);
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "weight must be a contiguous matrix");
  const int64_t n = weight.size(0), k = weight.size(1);
  TORCH_CHECK(k % 16 == 0, "packed weights need a multiple of 16 inputs, not ", k);
  const int64_t blocks = (n + kItem - 1) / kItem * (kItem / kBlock), groups = (k + kGroup - 1) / kGroup;
  Tensor packed = at::empty({blocks, groups * kGroup / 4 * bits / 8, kBlock * 4}, at::kByte);
  Tensor scale = at::empty({blocks, groups, kBlock}, at::kBFloat16);
  const Dtype type = dtype_of(weight, "weight");
  on_team(path(), 1, [&](const Kernels& kernels, Worker me) {
    kernels.pack(me, weight.const_data_ptr(), type, n, k, bits, packed.data_ptr<uint8_t>(),
                 static_cast<uint16_t*>(scale.data_ptr()));
  });
  return {packed, scale};
}

std::vector<int64_t> levels() { return {std::begin(kLevel), std::end(kLevel)}; }

Tensor int8_linear(const Tensor& x, const Tensor& weight, const Tensor& scale, const Tensor& bias, int64_t n) {
  TORCH_CHECK(x.dim() == 2, "x must be [rows, k]");
  const int64_t rows = x.size(0), k = x.size(1);
  const float* in = floats(x, rows * k, "x");
  const Linear w = linear_of(weight, scale, bias, n, k);
  Tensor y = at::empty({rows, n}, at::kFloat);
  const Quantized room(rows, w.groups);
  on_team(path(), 2, [&](const Kernels& kernels, Worker me) {
    kernels.linear(me, w, in, room.view(rows, w.groups), y.data_ptr<float>(), path().amx);
  });
  return y;
}

// The part of a pass that says where keys are; fills `p` and returns the longest context.
int64_t read_cache(Pass& p, const Tensor& rows, const Tensor& positions, const Tensor& block_table, const Tensor& k,
                   int64_t kv_heads, int64_t head_dim) {
  TORCH_CHECK(k.dim() == 4 && k.size(1) == kv_heads && k.size(3) == head_dim,
              "caches must be [blocks, kv_heads, block_size, head_dim]");
  TORCH_CHECK(block_table.dim() == 2, "block_table must be [rows, blocks]");
  p.block_size = k.size(2);
  p.blocks_per_row = block_table.size(1);
  p.rows = indices(rows, p.num_tokens, block_table.size(0), "rows");
  p.positions = indices(positions, p.num_tokens, p.blocks_per_row * p.block_size, "positions");
  TORCH_CHECK(block_table.scalar_type() == at::kLong && block_table.is_contiguous(), "block_table must be int64");
  p.block_table = block_table.const_data_ptr<int64_t>();
  p.kv_dtype = dtype_of(k, "cache");
  int64_t longest = 0;
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    longest = std::max(longest, p.positions[t] + 1);
    const int64_t* blocks = p.block_table + p.rows[t] * p.blocks_per_row;
    for (int64_t b = 0; b <= p.positions[t] / p.block_size; ++b)
      TORCH_CHECK(blocks[b] >= 0 && blocks[b] < k.size(0), "row ", p.rows[t], " has no block for position ", p.positions[t]);
  }
  return longest;
}

void check_cache(const Tensor& t, const Tensor& like) {
  TORCH_CHECK(t.sizes() == like.sizes() && t.scalar_type() == like.scalar_type() && t.is_contiguous(),
              "all caches must be contiguous and alike");
}

Tensor attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& rows,
                 const Tensor& positions, const Tensor& block_table, double scale) {
  TORCH_CHECK(q.dim() == 3 && k_cache.dim() == 4, "q must be [tokens, heads, head_dim]");
  Model m{};
  m.heads = q.size(1), m.kv_heads = k_cache.size(1), m.head_dim = q.size(2), m.attention_scale = static_cast<float>(scale);
  TORCH_CHECK(m.heads % m.kv_heads == 0 && m.head_dim % 16 == 0 && m.head_dim <= kMaxHeadDim, "unsupported heads");
  check_cache(k_cache, k_cache), check_cache(v_cache, k_cache);
  Pass p{};
  p.num_tokens = q.size(0);
  const int64_t longest = read_cache(p, rows, positions, block_table, k_cache, m.kv_heads, m.head_dim);
  void *k = k_cache.data_ptr(), *v = v_cache.data_ptr();
  p.k_cache = &k, p.v_cache = &v;
  Scratch s{};
  s.scores_per_thread = m.heads / m.kv_heads * ((longest + 15) / 16 * 16 + 1);
  const Tensor scores = at::empty({at::get_num_threads(), s.scores_per_thread}, at::kFloat);
  s.scores = scores.data_ptr<float>();
  Tensor out = at::empty(q.sizes(), at::kFloat);
  const float* in = floats(q, q.numel(), "q");
  on_team(path(), 1, [&](const Kernels& kernels, Worker me) {
    kernels.attention(me, m, p, 0, in, m.heads * m.head_dim, out.data_ptr<float>(), nullptr, s);
  });
  return out;
}

// One loaded model. `sizes`: hidden, intermediate, heads, kv_heads, head_dim, activation; `numbers`: norm
// epsilon, attention scale, embedding scale; `shared`: embedding, cos, sin, final norm, then the head's
// weight and scale; `layers`: per layer four norms (input, q, k, post; q and k may be empty), then
// weight, scale and bias of qkv, o, gate_up and down (an empty bias is none).
class Decoder : public torch::CustomClassHolder {
 public:
  Decoder(std::vector<int64_t> sizes, std::vector<double> numbers, std::vector<Tensor> shared, std::vector<Tensor> layers)
      : shared_(std::move(shared)), tensors_(std::move(layers)) {
    TORCH_CHECK(sizes.size() == 6 && numbers.size() == 3 && shared_.size() == 6 && tensors_.size() % kPerLayer == 0,
                "wrong number of decoder parameters");
    Model& m = model_;
    m.hidden = sizes[0], m.intermediate = sizes[1], m.heads = sizes[2], m.kv_heads = sizes[3], m.head_dim = sizes[4];
    m.activation = static_cast<Activation>(sizes[5]);
    m.eps = static_cast<float>(numbers[0]), m.attention_scale = static_cast<float>(numbers[1]);
    m.embed_scale = static_cast<float>(numbers[2]);
    TORCH_CHECK(m.hidden % 16 == 0 && m.intermediate % 16 == 0 && m.head_dim % 16 == 0, "sizes must be multiples of 16");
    TORCH_CHECK(m.head_dim <= kMaxHeadDim && m.heads % m.kv_heads == 0, "unsupported heads");
    TORCH_CHECK(shared_[0].dim() == 2 && shared_[0].is_contiguous() && shared_[0].size(1) == m.hidden, "bad embedding");
    m.vocab = shared_[0].size(0), m.embed = shared_[0].const_data_ptr(), m.embed_dtype = dtype_of(shared_[0], "embedding");
    TORCH_CHECK(shared_[1].dim() == 2, "cos must be [positions, rope_dim / 2]");
    m.max_position = shared_[1].size(0), m.rope_dim = shared_[1].size(1) * 2;
    TORCH_CHECK(m.rope_dim <= m.head_dim, "rope is wider than a head");
    m.cos = floats(shared_[1], shared_[1].numel(), "cos"), m.sin = floats(shared_[2], shared_[1].numel(), "sin");
    m.final_norm = floats(shared_[3], m.hidden, "final norm");
    m.head = linear_of(shared_[4], shared_[5], Tensor(at::empty({0})), m.vocab, m.hidden);
    const int64_t width = m.heads * m.head_dim, qkv = width + 2 * m.kv_heads * m.head_dim;
    for (size_t i = 0; i < tensors_.size(); i += kPerLayer) {
      const Tensor* t = &tensors_[i];
      const auto linear = [&](int at, int64_t n, int64_t k) { return linear_of(t[at], t[at + 1], t[at + 2], n, k); };
      layers_.push_back({floats(t[0], m.hidden, "input norm"), floats_or_null(t[1], m.head_dim, "q norm"),
                         floats_or_null(t[2], m.head_dim, "k norm"), floats(t[3], m.hidden, "post norm"),
                         linear(4, qkv, m.hidden), linear(7, m.hidden, width),
                         linear(10, 2 * m.intermediate, m.hidden), linear(13, m.hidden, m.intermediate)});
    }
    m.layers = layers_.data(), m.num_layers = static_cast<int64_t>(layers_.size());
  }

  // See gateway/kernels/decoder.py for the shapes.
  std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& tokens, const Tensor& positions, const Tensor& rows,
                                             const Tensor& block_table, const std::vector<Tensor>& k_cache,
                                             const std::vector<Tensor>& v_cache, const Tensor& wanted) {
    const std::lock_guard<std::mutex> lock(mutex_);  // the scratch is shared
    const Model& m = model_;
    Pass p{};
    p.num_tokens = tokens.numel(), p.num_wanted = wanted.numel();
    p.tokens = indices(tokens, p.num_tokens, m.vocab, "tokens");
    p.wanted = indices(wanted, p.num_wanted, p.num_tokens, "wanted");
    TORCH_CHECK(k_cache.size() == layers_.size() && v_cache.size() == layers_.size(), "one cache a layer is needed");
    std::vector<void*> k, v;
    for (size_t i = 0; i < layers_.size(); ++i) {
      check_cache(k_cache[i], k_cache[0]), check_cache(v_cache[i], k_cache[0]);
      k.push_back(k_cache[i].data_ptr()), v.push_back(v_cache[i].data_ptr());
    }
    p.k_cache = k.data(), p.v_cache = v.data();
    const int64_t longest = read_cache(p, rows, positions, block_table, k_cache[0], m.kv_heads, m.head_dim);
    TORCH_CHECK(longest <= m.max_position, "position ", longest - 1, " is past the rotary table");
    Tensor logits = logits_room(p.num_wanted), entropy = at::empty({p.num_wanted}, at::kFloat);
    Tensor hidden = at::empty({p.num_wanted, m.hidden}, at::kFloat);
    p.logits = logits.data_ptr<float>(), p.attn_entropy = entropy.data_ptr<float>(), p.hidden = hidden.data_ptr<float>();
    Scratch s = room(std::max(p.num_tokens, p.num_wanted), longest);
    on_team(path(), kPhasesPerLayer * m.num_layers + 3, [&](const Kernels& kernels, Worker me) {
      kernels.forward(me, m, p, s, path().amx);
    });
    return {logits, entropy, hidden};
  }

 private:
  static constexpr size_t kPerLayer = 16, kLogitsKept = 3;

  // Tens of megabytes that the system would have to map and clear anew at every pass: a buffer is used
  // again once no tensor outside refers to it.
  Tensor logits_room(int64_t rows) {
    for (Tensor& buffer : logits_)
      if (buffer.size(0) >= rows && buffer.storage().use_count() == 1) return buffer.narrow(0, 0, rows);
    if (logits_.size() >= kLogitsKept) logits_.erase(logits_.begin());
    logits_.push_back(at::empty({rows, model_.vocab}, at::kFloat));
    return logits_.back().narrow(0, 0, rows);
  }

  Scratch room(int64_t tokens, int64_t longest) {
    const Model& m = model_;
    const int64_t width = m.heads * m.head_dim, qkv = width + 2 * m.kv_heads * m.head_dim;
    const int64_t groups = (std::max({m.hidden, m.intermediate, width}) + kGroup - 1) / kGroup;
    if (tokens > tokens_ || at::get_num_threads() > threads_) {
      tokens_ = std::max(tokens, tokens_), threads_ = at::get_num_threads();
      h_ = at::empty({tokens_, m.hidden}, at::kFloat);
      wide_ = at::empty({tokens_, std::max(qkv, 2 * m.intermediate)}, at::kFloat);
      narrow_ = at::empty({tokens_, width}, at::kFloat);
      entropy_ = at::empty({tokens_, m.heads}, at::kFloat);
      quantized_ = Quantized(tokens_, groups);
    }
    const int64_t scores = m.heads / m.kv_heads * ((longest + 15) / 16 * 16 + 1), all = at::get_num_threads() * scores;
    if (!scores_.defined() || scores_.numel() < all) scores_ = at::empty({all + all / 2}, at::kFloat);
    return {h_.data_ptr<float>(), wide_.data_ptr<float>(), narrow_.data_ptr<float>(), scores_.data_ptr<float>(),
            entropy_.data_ptr<float>(), scores, quantized_.view(tokens_, groups)};
  }

  std::vector<Tensor> shared_, tensors_, logits_;
  std::vector<Layer> layers_;
  Model model_{};
  std::mutex mutex_;
  int64_t tokens_ = 0, threads_ = 0;
  Tensor h_, wide_, narrow_, entropy_, scores_;
  Quantized quantized_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> summarize(const Tensor& logits, int64_t k) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.stride(1) == 1,
              "logits must be float32 [rows, vocab], each row contiguous");
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  TORCH_CHECK(k >= 1 && k <= kMostTop && k <= vocab, "k is ", k, ", 1 to ", std::min(kMostTop, vocab), " can be asked for");
  Tensor ids = at::empty({rows, k}, at::kLong), top = at::empty({rows, k}, at::kFloat);
  Tensor norm = at::empty({rows}, at::kFloat), entropy = at::empty({rows}, at::kFloat);
  const Summary first{ids.data_ptr<int64_t>(), top.data_ptr<float>(), norm.data_ptr<float>(), entropy.data_ptr<float>()};
  on_team(path(), 1, [&](const Kernels& kernels, Worker me) {
    kernels.summarize(me, logits.const_data_ptr<float>(), logits.stride(0), rows, vocab, k, first);
  });
  return {ids, top, norm, entropy};
}

int64_t read(const Tensor& bytes) {
  TORCH_CHECK(bytes.scalar_type() == at::kByte && bytes.is_contiguous(), "bytes must be contiguous uint8");
  std::atomic<int64_t> all{0};
  on_team(path(), 1, [&](const Kernels& kernels, Worker me) {
    all += kernels.read(me, bytes.const_data_ptr<uint8_t>(), bytes.numel());
  });
  return all;
}

double peak(int64_t repeats) {
  double done = 0;
  on_team(path(), 0, [&](const Kernels& kernels, Worker) {
    const double here = kernels.peak(path().amx, repeats);
#pragma omp critical
    done += here;
  });
  return done;
}

}  // namespace

TORCH_LIBRARY(tokentape, lib) {
  lib.class_<Decoder>("Decoder")
      .def(torch::init<std::vector<int64_t>, std::vector<double>, std::vector<Tensor>, std::vector<Tensor>>())
      .def("forward", &Decoder::forward);
  lib.def("quantize_weight(Tensor weight, int bits) -> (Tensor, Tensor)", &quantize_weight);
  lib.def("levels() -> int[]", &levels);
  lib.def("int8_linear(Tensor x, Tensor weight, Tensor scale, Tensor bias, int n) -> Tensor", &int8_linear);
  lib.def(
      "attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor rows, Tensor positions, Tensor block_table, "
      "float scale) -> Tensor",
      &attention);
  lib.def("summarize(Tensor logits, int k) -> (Tensor, Tensor, Tensor, Tensor)", &summarize);
  lib.def("paths() -> str[]", &path_names);
  lib.def("use_path(str name) -> ()", &use_path);
  lib.def("read(Tensor bytes) -> int", &read);
  lib.def("peak(int repeats) -> float", &peak);
}

}  // namespace tokentape
