// A kernel that does nothing for a while, as the predecessor of a kernel that is timed.
#include "backends/cuda/launch.h"
#include "backends/cuda/ptx/dependency.cuh"
#include "cuda/timing.h"

namespace dsacore::test {
namespace {

__global__ void spin(long long clocks) {
  cuda::wait_for_earlier_kernels();
  cuda::let_next_kernel_start();
  const long long start = clock64();
  while (clock64() - start < clocks) {
  }
}

}  // namespace

void enqueue_spin(double us, Queue queue) {
  constexpr double kClocksPerUs = 1980;
  cuda::launch(spin, {.grid = dim3(132), .block = dim3(256)},
               Workspace{.scratch = {}, .threads = nullptr, .target = nullptr, .queue = queue},
               static_cast<long long>(us * kClocksPerUs));
}

}  // namespace dsacore::test
