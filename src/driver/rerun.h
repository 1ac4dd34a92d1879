// StageRerun: one stage at a time, by a backend's kernels, on tensors that another run dumped. So each stage of that
// run is judged on the inputs that it really had, and an allowed difference early on does not count again later (spec
// 9).
#pragma once

#include <vector>

#include "driver/inputs.h"
#include "layer/model.h"
#include "memory/aligned_bytes.h"
#include "plan/registry.h"

namespace dsacore {

/// Outputs of the index projection.
struct IndexQuery {
  std::vector<uint8_t> codes;  ///< [B, index_heads, 128]
  std::vector<float> weights;  ///< [B, index_heads]
};

/// Outputs of the sparse core.
struct Attention {
  std::vector<BFloat16> latent;  ///< [B, H, 512]
  std::vector<float> lse;        ///< [B, H]
};

class StageRerun {
 public:
  /// `inputs` are borrowed. Throws `kUnsupported` where a stage has no kernel for the shape.
  StageRerun(const Backend& backend, const Inputs& inputs, int threads);

  /// Steps 2 to 4 from `q_c` [B, q_lora], in FP64 with the roundings of spec 4; no backend has this as a kernel of its
  /// own.
  std::vector<std::byte> query(const BFloat16* q_c);
  IndexQuery index_query(const BFloat16* q_c);
  /// Attention over `tokens` [B, topk] (`valid` [B] of each) of the cache `kv`.
  Attention attend(const std::byte* query, const std::vector<int32_t>& tokens, const std::vector<int32_t>& valid,
                   const KvCache& kv);
  /// `out` [B, H*128] of a latent; rows of empty requests are zero.
  std::vector<BFloat16> value(const std::vector<BFloat16>& latent);

  const LayerModel& model() const { return owned_.model; }
  Threads& threads() { return threads_; }

 private:
  /// The first kernel of a list that takes the shape, run.
  template <class Args>
  void run(std::span<const Kernel<Args>> kernels, const Args& args);

  const Backend& backend_;
  const Inputs& inputs_;
  OwnedModel owned_;
  Threads threads_;
  AlignedBytes packed_;
  ShapeKey shape_;
};

}  // namespace dsacore
