// Times of kernels inside a CUDA graph, where the host's launches are hidden and programmatic edges count.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "backends/cuda/launch.h"

namespace dsacore::test {

/// Enqueues a kernel of 132 blocks that occupies the chip for so many microseconds: what stands before the kernel under
/// test in a step. spin.cu.
void enqueue_spin(double us, Queue queue);

/// Brings the clocks up, once a process: an idle chip takes some hundred milliseconds to.
inline void warm_clocks() {
  static const bool warm = [] {
    for (int i = 0; i < 400; ++i) enqueue_spin(1000, {});
    cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return true;
  }();
  static_cast<void>(warm);
}

/// Microseconds a launch: a graph of `launches` calls of `enqueue(i, queue)`, median of several replays queued back to
/// back.
inline double graph_us(int launches, const std::function<void(int, Queue)>& enqueue, int replays = 15) {
  using cuda::check;
  warm_clocks();
  // The stream below waits for nothing: what the default one still copies and clears must be over, however long other
  // processes keep the device.
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  for (int i = 0; i < launches; ++i) enqueue(i, Queue{stream});
  cudaGraph_t graph;
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  cudaGraphExec_t exec;
  check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start), "cudaEventCreate");
  check(cudaEventCreate(&stop), "cudaEventCreate");
  constexpr int kQueued = 3;
  std::vector<double> times;
  for (int r = 0; r < replays + 2; ++r) {
    check(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
    check(cudaEventRecord(start, stream), "cudaEventRecord");
    for (int k = 0; k < kQueued; ++k) check(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
    check(cudaEventRecord(stop, stream), "cudaEventRecord");
    check(cudaEventSynchronize(stop), "cudaEventSynchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start, stop), "cudaEventElapsedTime");
    if (r >= 2) times.push_back(double(ms) * 1e3 / kQueued / launches);
  }
  check(cudaEventDestroy(start), "cudaEventDestroy");
  check(cudaEventDestroy(stop), "cudaEventDestroy");
  check(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace dsacore::test
