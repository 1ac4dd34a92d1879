#include <algorithm>

#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/dependency.cuh"
#include "cuda/chain_kernels.h"

namespace dsacore::test {
namespace {

constexpr int kThreads = 256;

struct SpoiledList {
  Spoiled tensors[kMostSpoiled];
  int count;
};

__global__ void __launch_bounds__(kThreads) poison(const __grid_constant__ SpoiledList list) {
  cuda::wait_for_earlier_kernels();
  cuda::let_next_kernel_start();
  for (int i = 0; i < list.count; ++i) {
    auto* words = reinterpret_cast<uint32_t*>(list.tensors[i].data);
    for (int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x; at < list.tensors[i].bytes / 4;
         at += int64_t(gridDim.x) * kThreads) {
      words[at] = 0xFFFFFFFFu;
    }
  }
}

/// One CTA a row and head.
__global__ void __launch_bounds__(kThreads) held_core(const __grid_constant__ SparseCoreArgs args) {
  const int64_t row = blockIdx.x;
  const int head = int(blockIdx.y);
  const int count = args.valid(row);
  uint32_t mix = 0;
  for (int i = 0; i < count && i < args.topk_rows.extent(1); ++i) mix = mix * 31 + uint32_t(args.topk_rows(row, i));
  const std::byte* query = args.query.at(row, head);
  for (int i = 0; i < kQueryRow * args.query.element; ++i) mix = mix * 31 + uint32_t(query[i]);
  cuda::wait_for_earlier_kernels();
  cuda::let_next_kernel_start();
  for (int i = int(threadIdx.x); i < kLatent; i += kThreads) {
    args.latent(row, head, i) = BFloat16{uint16_t(0x3C00 + (mix + uint32_t(i)) % 1024)};  // a little above 2^-7
  }
  if (threadIdx.x == 0) args.lse(row, head) = float(mix % 4096);
}

void run_held_core(const SparseCoreArgs& args, const Workspace& workspace) {
  cuda::launch(held_core,
               {.grid = dim3(unsigned(args.valid.extent(0)), unsigned(args.query.heads)), .block = dim3(kThreads)},
               workspace, args);
}

constexpr Kernel<SparseCoreArgs> kHeldCores[] = {{.name = "held",
                                                  .accepts = [](const ShapeKey&) { return Verdict{}; },
                                                  .scratch_bytes = [](const ShapeKey&, int) { return int64_t(0); },
                                                  .run = run_held_core,
                                                  .held = true}};

}  // namespace

void enqueue_poison(std::span<const Spoiled> tensors, Queue queue) {
  SpoiledList list = {};
  list.count = int(std::min<size_t>(tensors.size(), kMostSpoiled));
  std::copy_n(tensors.begin(), list.count, list.tensors);
  Workspace workspace{};
  workspace.queue = queue;
  cuda::launch(poison, {.grid = dim3(132), .block = dim3(kThreads)}, workspace, list);
}

std::span<const Kernel<SparseCoreArgs>> held_cores() { return kHeldCores; }

}  // namespace dsacore::test
