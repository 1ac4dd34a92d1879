// What racecheck reports although it is right, a kernel each: racecheck.txt names them. scripts/gpu-test.sh runs them,
// and fails where one is not reported: then the tool has learnt to follow it, and its entries are to go, and the
// kernel.
#include <cstdio>

#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/ptx/shared_memory.cuh"

namespace dsacore::cuda {
namespace {

/// A warp has read; after __syncwarp, which orders the reads of all its lanes before what follows, one lane arrives.
/// The other warp waits for that and writes. racecheck (2025.3 and 2026.3) takes the arrival to be of that lane's reads
/// alone.
__global__ void a_lane_arrives_for_its_warp(int* out) {
  __shared__ int words[32];
  __shared__ uint64_t memory;
  const Barrier empty = {shared_address(&memory)};
  const int lane = int(threadIdx.x) % 32;
  words[lane] = lane;
  if (threadIdx.x == 0) empty.init(1);
  __syncthreads();
  if (threadIdx.x >= 32) {
    out[lane] = words[31 - lane];
    __syncwarp();
    if (lane == 0) empty.arrive();
  } else {
    empty.wait(0);
    words[lane] = 0;
  }
}

/// The same of what a warp has written: another waits and reads.
__global__ void a_lane_publishes_for_its_warp(int* out) {
  __shared__ int words[32];
  __shared__ uint64_t memory;
  const Barrier written = {shared_address(&memory)};
  const int lane = int(threadIdx.x) % 32;
  if (threadIdx.x == 0) written.init(1);
  __syncthreads();
  if (threadIdx.x >= 32) {
    words[lane] = lane;
    __syncwarp();
    if (lane == 0) written.arrive();
  } else {
    written.wait(0);
    out[lane] = words[31 - lane];
  }
}

/// Two warpgroups: one writes and goes on (bar.arrive), the other waits (bar.sync), reads, and gives the words back in
/// the same way. bar.arrive orders what comes before it for those who wait. racecheck 2025.3 loses count; 2026.3 does
/// not.
__global__ void groups_take_turns(int* out) {
  __shared__ int words[128];
  const int thread = int(threadIdx.x) % 128;
  for (int turn = 0; turn < 6; ++turn) {
    if (threadIdx.x < 128) {
      if (turn > 0) barrier_meet(2, 256);
      words[thread] = turn;
      barrier_arrive(1, 256);
    } else {
      barrier_meet(1, 256);
      out[thread] += words[127 - thread];
      if (turn < 5) barrier_arrive(2, 256);
    }
  }
}

struct Finding {
  const char* name;
  void (*kernel)(int*);
  unsigned threads;
};
constexpr Finding kFindings[] = {
    {"a_lane_arrives_for_its_warp", a_lane_arrives_for_its_warp, 64},
    {"a_lane_publishes_for_its_warp", a_lane_publishes_for_its_warp, 64},
    {"groups_take_turns", groups_take_turns, 256},
};

}  // namespace
}  // namespace dsacore::cuda

/// Names the kernels, a line each, and runs them. Ends with 1 where one does not run.
int main() {
  int* out = nullptr;
  cudaMalloc(&out, 128 * sizeof(int));
  cudaMemset(out, 0, 128 * sizeof(int));
  for (const auto& finding : dsacore::cuda::kFindings) {
    std::printf("finding %s\n", finding.name);
    finding.kernel<<<1, finding.threads>>>(out);
    if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) {
      std::fprintf(stderr, "%s: %s\n", finding.name, cudaGetErrorString(error));
      return 1;
    }
  }
  return 0;
}
