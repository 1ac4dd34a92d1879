// A layer small enough to compute by hand, and a runner of single stages for the tests of the reference backend.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "format/layouts.h"
#include "plan/registry.h"

namespace dsacore::test {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline BFloat16 bf16(double x) { return to_bf16(x); }

/// Owned storage of a dense tensor, poisoned with 0xFF.
template <class T, int Rank>
class Tensor {
 public:
  template <class... Extents>
  explicit Tensor(Extents... extents)
      : values_(size_t((int64_t(extents) * ... * 1))), view_(values_.data(), extents...) {
    std::memset(static_cast<void*>(values_.data()), 0xFF, values_.size() * sizeof(T));
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  View<T, Rank> view() const { return view_; }
  template <class... Index>
  T& operator()(Index... index) const {
    return view_(index...);
  }
  void fill(T value) { std::fill(values_.begin(), values_.end(), value); }

 private:
  std::vector<T> values_;
  View<T, Rank> view_;
};

/// The smallest layer: q_lora 128, 8 index heads. Weights are zero and norms one until a test sets them.
class TinyLayer {
 public:
  explicit TinyLayer(int heads = 1)
      : q_norm(128),
        kv_norm(kLatent),
        w_qb(heads * kHeadQuery, 128),
        kv_b(heads, kKvB, kLatent),
        w_iq(8 * kIndexDim, 128),
        k_norm_weight(kIndexDim),
        k_norm_bias(kIndexDim) {
    q_norm.fill(bf16(1));
    kv_norm.fill(bf16(1));
    w_qb.fill(bf16(0));
    kv_b.fill(bf16(0));
    w_iq.fill(bf16(0));
    k_norm_weight.fill(1);
    k_norm_bias.fill(0);
    model.sizes = {128, heads, 8};
    model.config.softmax_scale = 1;
    model.config.index_softmax_scale = 1;
    model.config.index_head_scale = 1;
    model.config.eps = 0;
    model.q_norm = q_norm.view();
    model.kv_norm = kv_norm.view();
    model.w_qb = w_qb.view();
    model.kv_b = kv_b.view();
    model.w_iq = w_iq.view();
    model.k_norm_weight = k_norm_weight.view();
    model.k_norm_bias = k_norm_bias.view();
  }

  LayerModel model;
  Tensor<BFloat16, 1> q_norm, kv_norm;
  Tensor<BFloat16, 2> w_qb;
  Tensor<BFloat16, 3> kv_b;
  Tensor<BFloat16, 2> w_iq;
  Tensor<float, 1> k_norm_weight, k_norm_bias;
};

inline ShapeKey shape_of(const LayerModel& model, int64_t rows, int q, int ranks, int64_t max_context) {
  return {model.sizes, model.config.kv_format, model.config.index_format, model.config.topk, int(rows), q, ranks,
          max_context};
}

/// Runs a stage's only kernel with exactly the scratch it asks for; fails where it writes past it.
template <class Args>
void run_stage(std::span<const Kernel<Args>> kernels, const Args& args, const ShapeKey& shape, int threads = 2) {
  ASSERT_EQ(kernels.size(), 1u);
  EXPECT_EQ(kernels[0].name, "reference");
  EXPECT_TRUE(kernels[0].accepts(shape).ok);
  const size_t bytes = size_t(kernels[0].scratch_bytes(shape, threads));
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> lines(bytes / sizeof(Line) + 2);
  std::memset(static_cast<void*>(lines.data()), 0xFF, lines.size() * sizeof(Line));
  std::byte* scratch = lines[0].bytes;
  Threads team(threads);
  kernels[0].run(args, {{scratch, bytes}, &team, reference_backend().target_data});
  for (size_t i = bytes; i < lines.size() * sizeof(Line); ++i) {
    ASSERT_EQ(int(scratch[i]), 0xFF) << "written past the scratch of " << bytes << " bytes, at " << i;
  }
}

}  // namespace dsacore::test
