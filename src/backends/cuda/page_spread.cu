// Fills a cache on the device from a pool of pages (memory/page_spread.h). Bound: writes; 5.5 GB take 2 ms.
#include "backends/cuda/launch.h"
#include "backends/cuda/page_spread.h"

namespace dsacore::cuda {
namespace {

constexpr int kThreads = 256;

/// A CTA a page.
__global__ void __launch_bounds__(kThreads) spread_page(const __grid_constant__ PageSpread s) {
  const int64_t page = blockIdx.x;
  const auto* from = reinterpret_cast<const uint64_t*>(s.pool + pool_page_of(s, page) * s.page_bytes);
  auto* to = reinterpret_cast<uint64_t*>(s.to + page * s.page_bytes);
  for (int i = int(threadIdx.x); i < s.page_bytes / 8; i += kThreads) to[i] = spread_word(s, page, i, from[i]);
}

}  // namespace

void enqueue_page_spread(const PageSpread& spread) {
  if (spread.pages == 0) return;
  const Workspace plain{.scratch = {}, .threads = nullptr, .target = nullptr, .early_start = false};
  launch(spread_page, {.grid = dim3(unsigned(spread.pages)), .block = dim3(kThreads)}, plain, spread);
}

}  // namespace dsacore::cuda
