// A layer of one head and eight index heads whose weights are ones and zeros, so that every sum of the query stages is
// exact and their roundings can be tested number by number. q_a is all ones and eps 0: q_c is the norm's weight.
#pragma once

#include <cstring>
#include <vector>

#include "layer/model.h"
#include "plan/registry.h"
#include "support/stages.h"

namespace dsacore::test {

class PlainLayer {
 public:
  static constexpr int kQLora = 128;
  static constexpr int kIndexHeads = 8;

  /// x[k] = q_c[k % 128] (pe: k - 128), with `pairs` plus q_c[k % 128 ^ 64]; u[n] = x[n % 128]; iq of head h [i] =
  /// q_c[i] * 2^(3h).
  explicit PlainLayer(bool pairs) {
    const BFloat16 one = to_bf16(1.0f);
    config.eps = 0;
    config.softmax_scale = config.index_softmax_scale = config.index_head_scale = 1;
    config.softmax_scale = 1;
    for (int i = 0; i < kHeadQuery; ++i) {
      w_qb[size_t(i * kQLora + i % kQLora)] = one;
      if (pairs) w_qb[size_t(i * kQLora + (i % kQLora ^ 64))] = one;
    }
    for (int n = 0; n < kLatent; ++n) {
      kv_b[size_t(n % kNope * kLatent + n)] = one;                    // W_UK
      if (n < kValue) kv_b[size_t((kNope + n) * kLatent + n)] = one;  // W_UV transposed: v[n] = latent[n]
    }
    for (int h = 0; h < kIndexHeads; ++h) {
      for (int i = 0; i < kIndexDim; ++i) w_iq[size_t((h * kIndexDim + i) * kQLora + i)] = to_bf16(float(1 << 3 * h));
    }
  }

  void set_q_c(const std::vector<BFloat16>& values) { q_norm = values; }

  OwnedModel model() const {
    LayerWeights w;
    w.q_a_layernorm = {q_norm.data(), ElementType::kBf16, 1, {kQLora, 0}};
    w.kv_a_layernorm = {kv_norm.data(), ElementType::kBf16, 1, {kLatent, 0}};
    w.q_b_proj = {w_qb.data(), ElementType::kBf16, 2, {kHeadQuery, kQLora}};
    w.kv_b_proj = {kv_b.data(), ElementType::kBf16, 2, {kKvB, kLatent}};
    w.wq_b = {w_iq.data(), ElementType::kBf16, 2, {kIndexHeads * kIndexDim, kQLora}};
    w.k_norm_weight = {k_norm.data(), ElementType::kF32, 1, {kIndexDim, 0}};
    return make_model(config, w);
  }

  /// Query rows of a step of equal rows that inserts nothing.
  std::vector<std::byte> run_query(const Backend& backend, int rows) const {
    Run run(*this, backend, rows);
    const int element = has_fp8_query(config.kv_format) ? 1 : 2;
    std::vector<std::byte> query(size_t(rows * kQueryRow * element), std::byte(kPoison));
    std::vector<BFloat16> q_c(size_t(rows * kQLora));
    run(backend.query, QueryArgs{&run.owned.model,
                                 run.projected(),
                                 run.slots(),
                                 {},
                                 View<BFloat16, 2>(q_c.data(), rows, kQLora),
                                 QueryRows{query.data(), 1, element}});
    return query;
  }

  /// Index query and head weights of a step of equal rows whose q_c is the norm's weight.
  struct IndexOutput {
    std::vector<uint8_t> query;  ///< [rows, 8, 128]
    std::vector<float> weights;  ///< [rows, 8]
  };
  IndexOutput run_index(const Backend& backend, int rows) const {
    Run run(*this, backend, rows);
    std::vector<BFloat16> q_c;
    for (int row = 0; row < rows; ++row) q_c.insert(q_c.end(), q_norm.begin(), q_norm.end());
    IndexOutput out{std::vector<uint8_t>(size_t(rows * kIndexHeads * kIndexDim), kPoison),
                    std::vector<float>(size_t(rows * kIndexHeads))};
    run(backend.index_projection, IndexProjectionArgs{&run.owned.model,
                                                      run.projected(),
                                                      View<const BFloat16, 2>(q_c.data(), rows, kQLora),
                                                      run.slots(),
                                                      {},
                                                      View<uint8_t, 3>(out.query.data(), rows, kIndexHeads, kIndexDim),
                                                      View<float, 2>(out.weights.data(), rows, kIndexHeads)});
    return out;
  }

  LayerConfig config;
  std::vector<BFloat16> q_norm = std::vector<BFloat16>(kQLora), kv_norm = std::vector<BFloat16>(kLatent),
                        w_qb = std::vector<BFloat16>(kHeadQuery * kQLora), kv_b = std::vector<BFloat16>(kKvB * kLatent),
                        w_iq = std::vector<BFloat16>(kIndexHeads * kIndexDim * kQLora);
  std::vector<float> k_norm = std::vector<float>(kIndexDim, 1.0f);

 private:
  struct Run {
    Run(const PlainLayer& layer, const Backend& backend_, int rows_)
        : backend(backend_),
          rows(rows_),
          threads(1),
          owned(layer.model()),
          row_values(size_t(rows_) * size_t(owned.model.sizes.width()), to_bf16(1.0f)),
          slot_values(size_t(rows_), -1) {
      packed.poison(backend.packed_bytes(owned.model.sizes));
      backend.pack(owned.model, packed.data(), threads);
      owned.model.packed = packed.data();
    }
    View<const BFloat16, 2> projected() const {
      return View<const BFloat16, 2>(row_values.data(), rows, owned.model.sizes.width());
    }
    View<const int64_t, 1> slots() const { return View<const int64_t, 1>(slot_values.data(), rows); }

    template <class Args>
    void operator()(std::span<const Kernel<Args>> kernels, const Args& args) {
      ShapeKey shape{};
      shape.sizes = owned.model.sizes;
      shape.rows = rows;
      for (const Kernel<Args>& kernel : kernels) {
        if (!kernel.accepts(shape).ok) continue;
        const int64_t bytes = kernel.scratch_bytes(shape, 1);
        scratch.poison(bytes);
        return kernel.run(args, {{scratch.data(), size_t(bytes)}, &threads, backend.target_data});
      }
    }

    const Backend& backend;
    int rows;
    Threads threads;
    OwnedModel owned;
    std::vector<BFloat16> row_values;
    std::vector<int64_t> slot_values;
    Buffer<std::byte> packed, scratch;
  };
};

}  // namespace dsacore::test
