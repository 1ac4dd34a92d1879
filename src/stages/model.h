// LayerModel: a layer's checked weights and constants, as every stage sees them. Built once by src/layer/prepare.cpp.
#pragma once

#include "dsacore/problem.h"

namespace dsacore {

struct LayerModel {
  LayerSizes sizes;
  LayerConfig config;
  float q_scale = 1;                   ///< 1 / q_scale_inv in FP32 for FP8 queries, else 1
  float k_scale = 1;                   ///< 1 / k_scale_inv in FP32 for the `fp8` cache, else 1
  View<const BFloat16, 1> q_norm;      ///< [q_lora]
  View<const BFloat16, 1> kv_norm;     ///< [512]
  View<const BFloat16, 2> w_qb;        ///< [heads*192, q_lora]
  View<const BFloat16, 3> kv_b;        ///< [heads, 256, 512]: rows 0..127 W_UK[h], rows 128..255 W_UV[h] transposed
  View<const BFloat16, 2> w_iq;        ///< [index_heads*128, q_lora]
  View<const float, 1> k_norm_weight;  ///< [128]
  View<const float, 1> k_norm_bias;    ///< [128]
  const std::byte* packed = nullptr;   ///< what the backend's `pack` wrote at prepare; null: nothing

  /// softmax_scale with the scales of query and cache (spec 5, step 11); the latent is still to be multiplied by
  /// `k_scale`.
  float attention_scale() const { return float(config.softmax_scale * double(q_scale) * double(k_scale)); }

  /// W_UV of all heads, transposed, inside `kv_b`: [heads, 128, 512].
  View<const BFloat16, 3> w_uv() const {
    return View<const BFloat16, 3>(kv_b.row(0, kNope), sizes.heads, kValue, kLatent).with_pitch(kv_b.stride(0));
  }
};

}  // namespace dsacore
