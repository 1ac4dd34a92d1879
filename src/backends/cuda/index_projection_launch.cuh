// Host side of the index front: its arguments, and the choice of how many tokens it takes at a time.
#pragma once

#include <algorithm>

#include "backends/cuda/index_projection_front.cuh"
#include "backends/cuda/tensor_map.h"

namespace dsacore::cuda {

/// Clusters of four that 132 SMs hold at once with two CTAs an SM, as the occupancy query tells.
inline constexpr int kMostClusters = 62;

template <int Tokens, int PartBlocks, template <int, int> class Activations>
struct FrontKernel {
  static void launch_it(const IndexProjectionArgs& args, const Workspace& workspace) {
    const LayerModel& model = *args.model;
    const int q_lora = model.sizes.q_lora, heads = model.sizes.index_heads, rows = int(args.projected.extent(0));
    FrontArguments a = {};
    a.weights = tensor_map(model.w_iq.data(), int64_t(heads) * kIndexDim, q_lora, q_lora, kWarpgroupRows);
    a.projected = args.projected;
    a.aligned16 = reinterpret_cast<uintptr_t>(a.projected.data()) % 16 == 0 && a.projected.stride(0) % 8 == 0;
    const View<const BFloat16, 2>& from = Activations<Tokens, PartBlocks>::kPacked ? args.projected : args.q_c;
    if (!Activations<Tokens, PartBlocks>::kPacked || a.aligned16) {
      a.activations = tensor_map(from.data(), rows, q_lora, from.stride(0), Tokens);
    }
    a.q_norm = model.q_norm.data();
    a.q_c = args.q_c_out;
    a.output = head_output(args);
    a.keys = key_insert(args);
    a.eps = float(model.config.eps);
    a.q_lora = q_lora;
    a.heads = heads;
    a.head_clusters = heads < kMostClusters ? heads : (heads + 1) / 2;
    a.key_clusters =
        std::clamp((rows + kParts * kFrontWarps - 1) / (kParts * kFrontWarps), 1, kMostClusters - a.head_clusters);
    a.rows = rows;
    launch(index_front<Tokens, PartBlocks, Activations>,
           {.grid = dim3(unsigned((a.head_clusters + a.key_clusters) * kParts)),
            .block = dim3(kFrontThreads),
            .shared_bytes = FrontShape<Tokens, PartBlocks>::kBytes,
            .cluster = kParts},
           workspace, a);
  }
  static void prepare_it() {
    allow_shared(index_front<Tokens, PartBlocks, Activations>, FrontShape<Tokens, PartBlocks>::kBytes);
  }
};

/// Parts of three blocks are those of q_lora up to 1536; longer rows leave no room for 64 tokens. `OfOneRow`: a step of
/// one row has another way.
template <template <int, int> class Activations, template <int, int> class OfOneRow = Activations>
void run_front_kernel(const IndexProjectionArgs& args, const Workspace& workspace) {
  const int64_t rows = args.projected.extent(0);
  if (rows == 0) return;
  if (args.model->sizes.q_lora <= 3 * kParts * kNormBlock) {
    if (rows == 1) return FrontKernel<8, 3, OfOneRow>::launch_it(args, workspace);
    if (rows <= 8) return FrontKernel<8, 3, Activations>::launch_it(args, workspace);
    if (rows <= 16) return FrontKernel<16, 3, Activations>::launch_it(args, workspace);
    if (rows <= 32) return FrontKernel<32, 3, Activations>::launch_it(args, workspace);
    return FrontKernel<64, 3, Activations>::launch_it(args, workspace);
  }
  if (rows == 1) return FrontKernel<8, 4, OfOneRow>::launch_it(args, workspace);
  if (rows <= 8) return FrontKernel<8, 4, Activations>::launch_it(args, workspace);
  if (rows <= 16) return FrontKernel<16, 4, Activations>::launch_it(args, workspace);
  return FrontKernel<32, 4, Activations>::launch_it(args, workspace);
}

template <template <int, int> class Activations, template <int, int> class OfOneRow = Activations>
void prepare_front_kernel() {
  FrontKernel<8, 3, OfOneRow>::prepare_it();
  FrontKernel<8, 4, OfOneRow>::prepare_it();
  FrontKernel<8, 3, Activations>::prepare_it();
  FrontKernel<16, 3, Activations>::prepare_it();
  FrontKernel<32, 3, Activations>::prepare_it();
  FrontKernel<64, 3, Activations>::prepare_it();
  FrontKernel<8, 4, Activations>::prepare_it();
  FrontKernel<16, 4, Activations>::prepare_it();
  FrontKernel<32, 4, Activations>::prepare_it();
}

}  // namespace dsacore::cuda
