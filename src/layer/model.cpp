#include "layer/model.h"

#include <array>
#include <string>

#include "dsacore/status.h"
#include "format/numeric.h"

namespace dsacore {
namespace {

[[noreturn]] void refuse(std::string argument, std::string value, std::string allowed) {
  throw Exception({ErrorCode::kRefused, std::move(argument), std::move(value), std::move(allowed)});
}

std::string text_of(const TensorRef& t) {
  std::string text = std::string(name_of(t.type)) + " [";
  for (int i = 0; i < t.rank; ++i) text += (i > 0 ? ", " : "") + std::to_string(t.shape[i]);
  return text + "]";
}

/// Requires a BF16 tensor of the given shape; -1 allows any extent.
void require_bf16(const char* name, const TensorRef& t, int rank, int64_t rows, int64_t columns) {
  std::string allowed = "must be BF16 [";
  allowed += rows < 0 ? "n" : std::to_string(rows);
  if (rank == 2) allowed += ", " + (columns < 0 ? std::string("n") : std::to_string(columns));
  allowed += "]";
  if (t.data == nullptr) refuse(name, "absent", allowed);
  const bool fits =
      t.rank == rank && (rows < 0 || t.shape[0] == rows) && (rank == 1 || columns < 0 || t.shape[1] == columns);
  if (t.type != ElementType::kBf16 || !fits) refuse(name, text_of(t), allowed);
}

void require_norm(const char* name, const TensorRef& t) {
  const bool typed = t.type == ElementType::kF32 || t.type == ElementType::kBf16;
  if (!typed || t.rank != 1 || t.shape[0] != kIndexDim) refuse(name, text_of(t), "must be F32 or BF16 [128]");
}

using Norm = std::array<float, kIndexDim>;

/// A norm's weights in FP32; absent ones are zero.
Norm read_norm(const TensorRef& t, const Memory& memory) {
  Norm norm = {};
  if (t.data == nullptr) return norm;
  const auto* from = static_cast<const std::byte*>(t.data);
  if (t.type == ElementType::kF32) {
    memory.copy_out(norm.data(), from, int64_t(sizeof(norm)));
    return norm;
  }
  std::array<BFloat16, kIndexDim> narrow;
  memory.copy_out(narrow.data(), from, int64_t(sizeof(narrow)));
  for (size_t i = 0; i < norm.size(); ++i) norm[i] = to_float(narrow[i]);
  return norm;
}

void require_scale(const char* name, double value) {
  if (!(value > 0) || !(value < 1e30)) refuse(name, std::to_string(value), "must be finite and positive");
}

}  // namespace

Status check_address(const char* argument, const void* data, size_t alignment) {
  const uintptr_t past = reinterpret_cast<uintptr_t>(data) % alignment;
  if (past == 0) return {};
  return Status({ErrorCode::kRefused, argument,
                 "an address " + std::to_string(past) + " bytes past a multiple of " + std::to_string(alignment),
                 "must begin at a multiple of " + std::to_string(alignment) + " bytes"});
}

OwnedModel make_model(const LayerConfig& config, const LayerWeights& weights, Memory& memory, int alignment) {
  if (config.topk < 1 || config.topk > kMaxTopk) refuse("topk", std::to_string(config.topk), "allowed 1..2048");
  if (!(config.eps >= 0) || !(config.eps < 1e30))
    refuse("eps", std::to_string(config.eps), "must be finite, at least 0");
  require_scale("softmax_scale", config.softmax_scale);
  require_scale("index_softmax_scale", config.index_softmax_scale);
  require_scale("index_head_scale", config.index_head_scale);
  if (has_fp8_query(config.kv_format)) require_scale("q_scale_inv", config.q_scale_inv);
  if (config.kv_format == KvFormat::kFp8) require_scale("k_scale_inv", config.k_scale_inv);

  require_bf16("q_a_layernorm.weight", weights.q_a_layernorm, 1, -1, -1);
  const int64_t q_lora = weights.q_a_layernorm.shape[0];
  if (q_lora < kQLoraStep || q_lora > kMaxQLora || q_lora % kQLoraStep != 0) {
    refuse("q_lora", std::to_string(q_lora), "allowed: multiples of 128 up to 2048");
  }
  require_bf16("kv_a_layernorm.weight", weights.kv_a_layernorm, 1, kLatent, -1);
  require_bf16("q_b_proj.weight", weights.q_b_proj, 2, -1, q_lora);
  const int64_t heads = weights.q_b_proj.shape[0] / kHeadQuery;
  if (weights.q_b_proj.shape[0] % kHeadQuery != 0 || heads < 1 || heads > kMaxHeads) {
    refuse("q_b_proj.weight", text_of(weights.q_b_proj), "rows must be heads * 192 with heads 1..128");
  }
  require_bf16("kv_b_proj.weight", weights.kv_b_proj, 2, heads * kKvB, kLatent);
  require_bf16("indexer.wq_b.weight", weights.wq_b, 2, -1, q_lora);
  const int64_t index_heads = weights.wq_b.shape[0] / kIndexDim;
  if (weights.wq_b.shape[0] % kIndexDim != 0 || index_heads < kMinIndexHeads || index_heads > kMaxIndexHeads) {
    refuse("indexer.wq_b.weight", text_of(weights.wq_b), "rows must be index_heads * 128 with index_heads 8..64");
  }
  if (weights.k_norm_weight.data == nullptr) refuse("indexer.k_norm.weight", "absent", "must be F32 or BF16 [128]");

  require_norm("indexer.k_norm.weight", weights.k_norm_weight);
  if (weights.k_norm_bias.data != nullptr) require_norm("indexer.k_norm.bias", weights.k_norm_bias);
  const auto own = [&](const char* name, const TensorRef& t) {
    if (t.data != nullptr) memory.require_own(t.data, name);
  };
  const auto read_by_kernels = [&](const char* name, const TensorRef& t) {
    check_address(name, t.data, size_t(alignment)).or_throw();
    own(name, t);
  };
  read_by_kernels("q_a_layernorm.weight", weights.q_a_layernorm);
  read_by_kernels("kv_a_layernorm.weight", weights.kv_a_layernorm);
  read_by_kernels("q_b_proj.weight", weights.q_b_proj);
  read_by_kernels("kv_b_proj.weight", weights.kv_b_proj);
  read_by_kernels("indexer.wq_b.weight", weights.wq_b);
  own("indexer.k_norm.weight", weights.k_norm_weight);
  own("indexer.k_norm.bias", weights.k_norm_bias);

  OwnedModel owned;
  constexpr int64_t kNormBytes = int64_t(sizeof(Norm));
  owned.k_norm = MemoryBlock(memory, 2 * kNormBytes, "index key norm");
  const Norm weight = read_norm(weights.k_norm_weight, memory), bias = read_norm(weights.k_norm_bias, memory);
  memory.copy_in(owned.k_norm.data(), weight.data(), kNormBytes);
  memory.copy_in(owned.k_norm.data() + kNormBytes, bias.data(), kNormBytes);

  LayerModel& m = owned.model;
  m.sizes = {int(q_lora), int(heads), int(index_heads)};
  m.config = config;
  if (has_fp8_query(config.kv_format)) m.q_scale = 1.0f / config.q_scale_inv;
  if (config.kv_format == KvFormat::kFp8) m.k_scale = 1.0f / config.k_scale_inv;
  const auto bf16 = [](const TensorRef& t) { return static_cast<const BFloat16*>(t.data); };
  m.q_norm = View<const BFloat16, 1>(bf16(weights.q_a_layernorm), q_lora);
  m.kv_norm = View<const BFloat16, 1>(bf16(weights.kv_a_layernorm), kLatent);
  m.w_qb = View<const BFloat16, 2>(bf16(weights.q_b_proj), heads * kHeadQuery, q_lora);
  m.kv_b = View<const BFloat16, 3>(bf16(weights.kv_b_proj), heads, kKvB, kLatent);
  m.w_iq = View<const BFloat16, 2>(bf16(weights.wq_b), index_heads * kIndexDim, q_lora);
  const auto* k_norm = reinterpret_cast<const float*>(owned.k_norm.data());
  m.k_norm_weight = View<const float, 1>(k_norm, kIndexDim);
  m.k_norm_bias = View<const float, 1>(k_norm + kIndexDim, kIndexDim);
  return owned;
}

}  // namespace dsacore
