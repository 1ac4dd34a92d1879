// Step 9: scores of all keys that a row has to choose among, as ordered keys, and a histogram of them.
//
// The work is pages of 64 keys, each read once for all q rows of its request. All pages of all requests are dealt evenly, in order,
// over one CTA an SM. A producer warp keeps a ring of whole pages in flight by bulk copies; four warpgroups take them in
// turn: keys from registers (A, 64 rows), heads from shared memory (B), then relu, weights and the sum over heads in registers. A score
// depends on its key, query and weights alone: which CTA or warpgroup computes it, and in what page, changes no operation.
//
// Bounds: a page is 8448 bytes (fp8; 490 clk of an SM's share of DRAM) or 4352 (mxfp4; 252 clk). For 32 heads and q rows the
// products take 64 q clk, and relu and weights about 60 q (fp8) or 110 q (mxfp4, four sums a page). So fp8 is bound by DRAM up to
// q = 7, mxfp4 up to q = 1 or 2; above that by instruction issue.
#pragma once

#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/shared_memory.cuh"
#include "backends/cuda/score_bins.h"
#include "backends/cuda/scores_keys.cuh"
#include "backends/cuda/scores.h"
#include "format/paging.h"
#include "format/score_key.h"

namespace dsacore::cuda {

inline constexpr int kMathGroups = 4;
inline constexpr int kMathThreads = kMathGroups * 128;
inline constexpr int kScoreThreads = kMathThreads + 32;

/// A place in the ring of pages, and the parity of its barriers there.
struct RingPlace {
  int stage;
  uint32_t parity = 0;

  __device__ void advance(int by, int stages) {
    stage += by;
    if (stage >= stages) {
      stage -= stages;
      parity ^= 1;
    }
  }
};

/// Among the math warpgroups.
__device__ __forceinline__ void math_barrier() { asm volatile("bar.sync 1, %0;" ::"n"(kMathThreads) : "memory"); }

/// relu, with NaN kept.
__device__ __forceinline__ float relu(float x) {
  float r;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ int64_t length_of(const ScoresParameters& p, int request) {
  const int length = __ldcg(&p.seq_lens(request));
  return length < 0 ? 0 : length < p.context ? length : p.context;
}

/// Pages to score of all requests, as a running sum `first_unit` [requests + 1]. By one warp. Requests of which no row sees more than
/// topk tokens have none.
__device__ inline void count_units(const ScoresParameters& p, int* first_unit) {
  constexpr int kMost = kMaxRows / 32;
  const int lane = int(threadIdx.x) % 32, each = (p.requests + 31) / 32;
  int units[kMost], sum = 0;
  for (int i = 0; i < kMost; ++i) {
    const int request = lane * each + i;
    units[i] = 0;
    if (i < each && request < p.requests) {
      const int64_t n = length_of(p, request);
      units[i] = n > p.topk ? int(pages_of(n, kIndexPage)) : 0;
    }
    sum += units[i];
  }
  int before = sum;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, before, distance);
    if (lane >= distance) before += other;
  }
  if (lane == 31) first_unit[p.requests] = before;
  before -= sum;
  for (int i = 0; i < kMost; ++i) {
    const int request = lane * each + i;
    if (i < each && request < p.requests) first_unit[request] = before;
    before += units[i];
  }
}

/// The units of this CTA.
struct Share {
  int begin, end;

  __device__ Share(const int* first_unit, int requests) {
    const int64_t total = first_unit[requests];
    begin = int(total * blockIdx.x / gridDim.x);
    end = int(total * (blockIdx.x + 1) / gridDim.x);
  }
};

/// The request that a unit belongs to.
__device__ inline int request_of(const int* first_unit, int requests, int unit) {
  int low = 0, high = requests;  // first_unit[low] <= unit < first_unit[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first_unit[middle] <= unit ? low : high) = middle;
  }
  return low;
}

/// The page of the index cache that a unit is. Read past L1: the prefetch may have read it before it was written.
__device__ inline int32_t page_of(const ScoresParameters& p, const int* first_unit, int unit) {
  const int request = request_of(first_unit, p.requests, unit);
  const int32_t token = (unit - first_unit[request]) * kIndexPage;
  if (!p.index_block_table.empty()) {
    const int32_t entry = __ldcg(p.index_block_table.row(request) + token / kIndexPage);
    return index_place(nullptr, &entry, p.page, LocalId(0)).page.value();
  }
  const int32_t entry = __ldcg(p.block_table.row(request) + token / p.page);
  return index_place(&entry, nullptr, p.page, LocalId(token % p.page)).page.value();
}

/// Asks for the first pages of this CTA in L2, by what lengths and tables hold before the wait. They may be old: only time is lost.
template <class Keys>
__device__ inline void prefetch_pages(const ScoresParameters& p, int* first_unit) {
  count_units(p, first_unit);
  __syncwarp();
  const Share share(first_unit, p.requests);
  const int unit = share.begin + int(threadIdx.x) % 32;
  if (unit >= share.end || unit - share.begin >= p.stages) return;
  const int64_t page = page_of(p, first_unit, unit);
  if (page >= 0 && page < p.cache_pages) {
    prefetch_l2(p.cache + page * Keys::Layout::kPageBytes, Keys::Layout::kPageBytes);
  }
}

/// What the warps of a CTA share.
template <class Keys>
struct ScoresTools {
  const ScoresParameters& p;
  int tile_heads;
  std::byte* query;
  uint32_t* histograms;
  std::byte* pages;
  float* weights;
  int* first_unit;
  uint32_t query_address, barriers;

  __device__ ScoresTools(const ScoresParameters& parameters, int width, std::byte* shared) : p(parameters), tile_heads(p.passes * width) {
    const ScoresShared at(p.q, tile_heads, Keys::Layout::kPageBytes, p.stages, p.histograms != nullptr);
    query = shared;
    histograms = reinterpret_cast<uint32_t*>(shared + at.histograms);
    pages = shared + at.pages;
    weights = reinterpret_cast<float*>(shared + at.weights);
    first_unit = reinterpret_cast<int*>(shared + at.first_unit);
    query_address = fixed_shared_address(shared);
    barriers = fixed_shared_address(shared + at.barriers);
  }
  __device__ Barrier full(int stage) const { return {barriers + stage * 16}; }
  __device__ Barrier empty(int stage) const { return {barriers + stage * 16 + 8}; }
};

/// The producer warp: copies the CTA's pages into the ring. Lanes look up 32 pages at a time.
template <class Keys>
__device__ inline void copy_pages(const ScoresTools<Keys>& tools, const Share& share) {
  const ScoresParameters& p = tools.p;
  constexpr int kBytes = Keys::Layout::kPageBytes;
  const uint32_t ring = fixed_shared_address(tools.pages);
  RingPlace place{0};
  for (int begin = share.begin; begin < share.end; begin += 32) {
    const int unit = begin + int(threadIdx.x) % 32;
    const int32_t page = unit < share.end ? page_of(p, tools.first_unit, unit) : 0;
    const int count = min(32, share.end - begin);
    for (int i = 0; i < count; ++i) {
      const std::byte* from = p.cache + int64_t(__shfl_sync(~0u, page, i)) * kBytes;
      if (elect_one()) {
        tools.empty(place.stage).wait(place.parity ^ 1);
        tools.full(place.stage).expect(kBytes);
        bulk_copy(ring + uint32_t(place.stage * kBytes), from, kBytes, tools.full(place.stage));
      }
      place.advance(1, p.stages);
    }
  }
}

/// Puts the index queries of a request's rows into the B operand, and their weights beside them; padding is zero.
template <class Keys>
__device__ inline void load_query(const ScoresTools<Keys>& tools, int request) {
  const ScoresParameters& p = tools.p;
  constexpr int kEighths = kIndexDim / 8;
  for (int i = int(threadIdx.x); i < p.q * tools.tile_heads * kEighths; i += kMathThreads) {
    const int eighth = i % kEighths, line = i / kEighths;
    const int head = line % tools.tile_heads, row = request * p.q + line / tools.tile_heads;
    uint2 bytes = {0, 0};
    if (head < p.heads) bytes = __ldcg(reinterpret_cast<const uint2*>(p.query.row(row, head) + 8 * eighth));
    const QueryPart part = Keys::place_query(eighth, bytes);
    std::byte* to = tools.query + line * kIndexDim + part.quarter * 4;
    *reinterpret_cast<uint32_t*>(to + ((2 * part.step) ^ (line % 8)) * 16) = part.first;
    *reinterpret_cast<uint32_t*>(to + ((2 * part.step + 1) ^ (line % 8)) * 16) = part.second;
  }
  for (int i = int(threadIdx.x); i < p.q * tools.tile_heads; i += kMathThreads) {
    const int head = i % tools.tile_heads, row = request * p.q + i / tools.tile_heads;
    tools.weights[i] = head < p.heads ? __ldcg(p.weights.row(row) + head) : 0.0f;
  }
  fence_async_proxy();
}

/// Adds the histograms of a request's rows to those in memory, and clears them.
template <class Keys>
__device__ inline void merge_histograms(const ScoresTools<Keys>& tools, int request) {
  const ScoresParameters& p = tools.p;
  if (p.histograms == nullptr) return;
  uint32_t* to = p.histograms + int64_t(request) * p.q * kScoreBins;
  for (int i = int(threadIdx.x); i < p.q * kScoreBins; i += kMathThreads) {
    const uint32_t count = tools.histograms[i];
    if (count == 0) continue;
    atomicAdd(to + i, count);
    tools.histograms[i] = 0;
  }
}

/// sum_h w_h * relu(query_h . key) of one row for the thread's key, from N heads a pass.
template <class Keys, int N>
__device__ __forceinline__ float weighted_sum(const ScoresTools<Keys>& tools, const Keys& keys, int row, const KeyPlace& place) {
  float sum[2] = {0, 0};
  for (int pass = 0; pass < tools.p.passes; ++pass) {
    const int line = row * tools.tile_heads + pass * N;
    const uint64_t tile = swizzled_tile(tools.query_address + uint32_t(line * kIndexDim));
    float dots[N / 2];
    keys.template multiply<N>(tile, dots);
    const float* weights = tools.weights + line + 2 * place.quarter;
    for (int j = 0; j < N / 8; ++j) {
      const float2 weight = *reinterpret_cast<const float2*>(weights + 8 * j);
      for (int half = 0; half < 2; ++half) {
        sum[half] = fmaf(weight.x, relu(dots[4 * j + 2 * half]), sum[half]);
        sum[half] = fmaf(weight.y, relu(dots[4 * j + 2 * half + 1]), sum[half]);
      }
    }
  }
  // Four lanes hold a quarter of the heads each, of two keys; odd lanes go on with the second key.
  const bool odd = place.quarter & 1;
  const float other = __shfl_xor_sync(~0u, odd ? sum[0] : sum[1], 1);
  const float pair = (odd ? sum[1] : sum[0]) + other;
  return pair + __shfl_xor_sync(~0u, pair, 2);
}

/// Scores one page, `first_token` on, for the rows of its request that need it.
template <class Keys, int N>
__device__ __forceinline__ void score_page(const ScoresTools<Keys>& tools, const Keys& keys, const KeyPlace& place, int request,
                                           int64_t length, int first_token) {
  const ScoresParameters& p = tools.p;
  const int token = first_token + place.scored();
  for (int j = 0; j < p.q; ++j) {
    const int64_t n = keys_seen(length, p.q, j);
    if (n <= p.topk) continue;
    const uint32_t key = score_key(keys.score(weighted_sum<Keys, N>(tools, keys, j, place)));
    if (place.quarter >= 2 || token >= n) continue;
    p.keys[(int64_t(request) * p.q + j) * p.key_pitch + token] = key;
    if (p.histograms != nullptr) atomicAdd(tools.histograms + j * kScoreBins + bin_of_key(key), 1u);
  }
}

/// A math warpgroup: every fourth page of the CTA's share.
template <class Keys, int N>
__device__ inline void score_pages(const ScoresTools<Keys>& tools, const Share& share) {
  const ScoresParameters& p = tools.p;
  const int group = int(threadIdx.x) / 128;
  const KeyPlace place(int(threadIdx.x) % 128);
  RingPlace ring{group};
  int request = request_of(tools.first_unit, p.requests, share.begin);
  int unit = share.begin + group;
  for (int begin = share.begin; begin < share.end;) {
    while (tools.first_unit[request + 1] <= begin) ++request;
    const int end = min(share.end, tools.first_unit[request + 1]);
    const int64_t length = length_of(p, request);
    load_query(tools, request);
    math_barrier();
    for (; unit < end; unit += kMathGroups) {
      tools.full(ring.stage).wait(ring.parity);
      Keys keys;
      keys.load(tools.pages + ring.stage * Keys::Layout::kPageBytes, place);
      __syncwarp();
      if (threadIdx.x % 32 == 0) tools.empty(ring.stage).arrive();
      ring.advance(kMathGroups, p.stages);
      score_page<Keys, N>(tools, keys, place, request, length, (unit - tools.first_unit[request]) * kIndexPage);
    }
    math_barrier();
    merge_histograms(tools, request);
    begin = end;
  }
}

template <class Keys, int N>
__global__ void __launch_bounds__(kScoreThreads, 1) scores_kernel(const __grid_constant__ ScoresParameters p) {
  extern __shared__ __align__(1024) std::byte shared[];
  const ScoresTools<Keys> tools(p, N, shared);
  const bool produces = threadIdx.x >= kMathThreads;
  if (produces) {
    if (elect_one()) {
      for (int stage = 0; stage < p.stages; ++stage) {
        tools.full(stage).init(1);
        tools.empty(stage).init(4);
      }
      publish_barriers();
    }
    __syncwarp();
    prefetch_pages<Keys>(p, tools.first_unit);
  } else if (p.histograms != nullptr) {
    for (int i = int(threadIdx.x); i < p.q * kScoreBins; i += kMathThreads) tools.histograms[i] = 0;
  }
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (produces) count_units(p, tools.first_unit);
  __syncthreads();
  const Share share(tools.first_unit, p.requests);
  if (share.begin >= share.end) return;
  if (produces) {
    copy_pages(tools, share);
  } else {
    score_pages<Keys, N>(tools, share);
  }
}

/// The kernel for products of `width` heads: 8, 16, 24 or 32.
template <class Keys>
ScoresKernel scores_kernel_of(int width) {
  switch (width) {
    case 8: return scores_kernel<Keys, 8>;
    case 16: return scores_kernel<Keys, 16>;
    case 24: return scores_kernel<Keys, 24>;
    default: return scores_kernel<Keys, 32>;
  }
}

}  // namespace dsacore::cuda
