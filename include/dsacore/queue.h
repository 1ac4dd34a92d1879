// The caller's execution queue, without naming CUDA.
#pragma once

namespace dsacore {

/// A CUDA stream (`cudaStream_t`) on the cuda backend; not used by the CPU backends, which return when the step is
/// done.
struct Queue {
  void* stream = nullptr;
};

}  // namespace dsacore
