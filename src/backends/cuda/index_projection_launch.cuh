// Host side of the index front: its arguments, and the choice of how many tokens it takes at a time.
#pragma once

#include "backends/cuda/index_projection_front.cuh"

namespace dsacore::cuda {

/// Clusters of four that 132 SMs hold at once with two CTAs an SM (62 of them), less the one that inserts the keys.
inline constexpr int kMostHeadClusters = 61;

template <bool NormHere>
FrontArguments front_arguments(const IndexProjectionArgs& args, int tokens) {
  const LayerModel& model = *args.model;
  FrontArguments a = {};
  a.w_iq = model.w_iq.data();
  a.q_norm = model.q_norm.data();
  a.input = NormHere ? args.projected : args.q_c;
  a.aligned16 = reinterpret_cast<uintptr_t>(a.input.data()) % 16 == 0 && a.input.stride(0) % 8 == 0;
  a.q_c_out = args.q_c_out;
  a.output = head_output(args);
  a.keys = key_insert(args);
  a.plan = front_plan(tokens, model.sizes.q_lora);
  a.eps = float(model.config.eps);
  a.q_lora = model.sizes.q_lora;
  a.heads = model.sizes.index_heads;
  a.head_clusters = a.heads <= kMostHeadClusters ? a.heads : (a.heads + 1) / 2;
  a.rows = int(args.projected.extent(0));
  return a;
}

template <int Tokens, bool NormHere>
void launch_front(const IndexProjectionArgs& args, const Workspace& workspace) {
  const FrontArguments a = front_arguments<NormHere>(args, Tokens);
  launch(index_front<Tokens, NormHere>,
         {.grid = dim3(unsigned((a.head_clusters + 1) * kParts)),
          .block = dim3(kFrontThreads),
          .shared_bytes = a.plan.bytes,
          .cluster = kParts},
         workspace, a);
}

template <bool NormHere>
void run_front_kernel(const IndexProjectionArgs& args, const Workspace& workspace) {
  const int64_t rows = args.projected.extent(0);
  if (rows <= 8) return launch_front<8, NormHere>(args, workspace);
  if (rows <= 16) return launch_front<16, NormHere>(args, workspace);
  if (rows <= 32 || args.model->sizes.q_lora > most_q_lora(64)) return launch_front<32, NormHere>(args, workspace);
  return launch_front<64, NormHere>(args, workspace);
}

template <bool NormHere>
void prepare_front_kernel() {
  allow_shared(index_front<8, NormHere>, kFrontShared);
  allow_shared(index_front<16, NormHere>, kFrontShared);
  allow_shared(index_front<32, NormHere>, kFrontShared);
  allow_shared(index_front<64, NormHere>, kFrontShared);
}

}  // namespace dsacore::cuda
