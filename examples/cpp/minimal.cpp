// A whole program: a layer with made-up weights, one decode step of two requests over small caches, and its output.
// Build: see README.md, "Use it from C++". tests/readme runs it.
#include <dsacore/layer.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

constexpr int kQLora = 256, kHeads = 4, kIndexHeads = 8, kTopk = 16, kPages = 4, kRequests = 2;

/// `n` BF16 numbers of about `size`.
std::vector<dsacore::BFloat16> numbers(size_t n, float size, uint32_t seed) {
  std::vector<dsacore::BFloat16> out(n);
  for (dsacore::BFloat16& x : out) {
    seed = seed * 1664525u + 1013904223u;
    const float value = size * (float(seed >> 8) / float(1 << 23) - 1);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    x.bits = uint16_t(bits >> 16);
  }
  return out;
}

dsacore::TensorRef tensor(const std::vector<dsacore::BFloat16>& values, int64_t rows, int64_t columns) {
  return {values.data(), dsacore::ElementType::kBf16, columns > 0 ? 2 : 1, {rows, columns}};
}

}  // namespace

int main() {
  using namespace dsacore;
  // Weights: borrowed by the layer, so they live as long as it does.
  const auto q_norm = numbers(kQLora, 1, 1), kv_norm = numbers(kLatent, 1, 2), k_norm = numbers(kIndexDim, 1, 3);
  const auto q_b = numbers(size_t(kHeads) * kHeadQuery * kQLora, 0.1f, 4),
             kv_b = numbers(size_t(kHeads) * kKvB * kLatent, 0.1f, 5);
  const auto wq_b = numbers(size_t(kIndexHeads) * kIndexDim * kQLora, 0.1f, 6);
  const LayerWeights weights = {.q_a_layernorm = tensor(q_norm, kQLora, 0),
                                .kv_a_layernorm = tensor(kv_norm, kLatent, 0),
                                .q_b_proj = tensor(q_b, kHeads * kHeadQuery, kQLora),
                                .kv_b_proj = tensor(kv_b, kHeads * kKvB, kLatent),
                                .wq_b = tensor(wq_b, kIndexHeads * kIndexDim, kQLora),
                                .k_norm_weight = tensor(k_norm, kIndexDim, 0),
                                .k_norm_bias = {}};
  const LayerConfig config = {.topk = kTopk,
                              .softmax_scale = std::pow(kNope + kPe, -0.5),
                              .index_softmax_scale = std::pow(kIndexDim, -0.5),
                              .index_head_scale = std::pow(kIndexHeads, -0.5)};
  try {
    Context context;
    const LayerSizes sizes = {kQLora, kHeads, kIndexHeads};
    PreparedLayer layer(context, config, weights,
                        {.batches = {{kRequests, sizes.width()}}, .queries = {1}, .max_context = kPages * kIndexPage});

    std::vector<std::byte> kv(size_t(kPages) * kIndexPage * 656), index(size_t(kPages) * kIndexPage * 132);
    layer.prepare_cache({.data = kv.data(), .pages = kPages, .page = 64, .stride_rows = 64, .row_bytes = 656},
                        {.data = index.data(), .pages = kPages, .row_bytes = 132});

    // One step after another: each writes the new token of both requests, then attends to what came before.
    const int32_t table[kRequests][2] = {{0, 1}, {2, 3}};
    std::vector<BFloat16> out(size_t(kRequests) * kHeads * kValue);
    for (int32_t token = 0; token < 100; ++token) {
      const auto projected = numbers(size_t(kRequests) * size_t(sizes.width()), 1, 100 + uint32_t(token));
      int64_t slots[kRequests];
      const int32_t lengths[kRequests] = {token + 1, token + 1};
      for (int r = 0; r < kRequests; ++r) slots[r] = table[r][token / 64] * 64 + token % 64;
      Step step;
      step.batch = kRequests;
      step.projected = View<const BFloat16, 2>(projected.data(), kRequests, sizes.width());
      step.slots = step.index_slots = View<const int64_t, 1>(slots, kRequests);
      step.block_table = View<const int32_t, 2>(&table[0][0], kRequests, 2);
      step.seq_lens = View<const int32_t, 1>(lengths, kRequests);
      step.out = View<BFloat16, 2>(out.data(), kRequests, kHeads * kValue);
      layer.run(step).or_throw();
    }
    const StageViews stages = layer.stages();
    std::printf("request 0 attends to %d of 100 tokens; the first selected one is token %d\n", stages.valid(0),
                stages.topk_tokens(0, 0));
  } catch (const Exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 2;
  }
  return 0;
}
