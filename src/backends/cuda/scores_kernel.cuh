// Step 9: scores of all keys that a row has to choose among, as ordered keys, and a histogram of them.
//
// The work is pages of 64 keys, each read once for all q rows of its request. All pages of all requests are dealt
// evenly, in order, over one CTA an SM. A producer warp keeps a ring of whole pages in flight by bulk copies, from
// before the wait on where they hold no key of this step; two to four warpgroups take them in turn: keys from registers
// (A, 64 rows), heads from shared memory (B), then relu, weights and the sum over heads in registers. A score depends
// on its key, query and weights alone: which CTA or warpgroup computes it, and in what page, changes no operation.
//
// Keys stay in L2 until the selection reads them, if they are no more than some 8 MB; what L2 writes to memory of them
// costs what reading three times the bytes does: more are made in pieces (scores_pieces.cuh).
//
// Bounds: a page is 8448 bytes (fp8; 490 clk of an SM's share of DRAM) or 4352 (mxfp4; 252 clk). For 32 heads and q
// rows the products take 64 q clk, and a warp issues about 150 instructions a page, or 110 for each of two rows, mostly
// relu, weights, and the way to the key; mxfp4 adds 75, which make values of codes. At large contexts and q = 1 the
// copies alone take 0.9 of fp8's time and 0.7 of mxfp4's; that, and q > 1, are bound by issue and the latency of
// dependent steps.
#pragma once

#include "backends/cuda/ptx/cache_policy.cuh"
#include "backends/cuda/ptx/dependency.cuh"
#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/ptx/shared_memory.cuh"
#include "backends/cuda/score_bins.h"
#include "backends/cuda/scores.h"
#include "backends/cuda/scores_keys.cuh"
#include "backends/cuda/uniform.cuh"
#include "backends/cuda/warp_sum.cuh"
#include "format/paging.h"
#include "format/score_key.h"

namespace dsacore::cuda {

/// What an instance computes at a time and with how many threads: N heads a product, `Passes` products a row, `Rows`
/// rows; 0: the one row that each request has.
template <int N, int Passes, int Rows, int Groups>
struct ScoresTile {
  static constexpr bool kIsAlone = Rows == 0;
  static constexpr int kWidth = N, kPasses = Passes, kRows = kIsAlone ? 1 : Rows, kGroups = Groups;
  static constexpr int kHeads = N * Passes;
  static constexpr int kTiles = kRows * Passes;
  static constexpr int kMathThreads = Groups * 128;
  static constexpr int kThreads = kMathThreads + 32;
};

/// A place in the ring of pages, and the parity of its barriers there. The ring's length is a multiple of the number of
/// warpgroups: a stage always has the same reader, which has seen one of its phases before it asks for the next.
/// (Parity tells no more than two apart, and pages arrive in any order.)
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
template <class Tile>
__device__ __forceinline__ void math_barrier() {
  barrier_meet(1, Tile::kMathThreads);
}

__device__ __forceinline__ int length_of(const ScoresParameters& p, int request) {
  const int length = __ldcg(&p.seq_lens(request));
  return length < 0 ? 0 : length < p.context ? length : p.context;
}

/// The length of the request that a thread has; the first kMaxRows threads have one each.
__device__ __forceinline__ int length_of_thread(const ScoresParameters& p) {
  return int(threadIdx.x) < p.requests ? length_of(p, int(threadIdx.x)) : 0;
}

/// Units of all requests, whose lengths are the threads' `n`, as a running sum `first_unit` [requests + 1], and the
/// tokens that each one's last page lacks. By all threads. Requests of which no row sees more than topk tokens have no
/// units.
__device__ inline void count_units(const ScoresParameters& p, int n, uint8_t* lacks, int* first_unit, int* totals) {
  const int request = int(threadIdx.x), lane = request % 32, warp = request / 32;
  const int pages = n > p.topk ? int(pages_of(n, kIndexPage)) : 0;
  if (request < p.requests) lacks[request] = uint8_t(pages * kIndexPage - n);
  int units = sum_up_to_lane(pages > 0 ? kUnitsAhead + pages : 0);
  if (lane == 31 && warp < kMaxRows / 32) totals[warp] = units;
  __syncthreads();
  units += __reduce_add_sync(~0u, lane < min(warp, kMaxRows / 32) ? totals[lane] : 0);
  if (request < p.requests) first_unit[request + 1] = units;
  if (request == 0) first_unit[0] = 0;
  __syncthreads();
}

/// Units of a CTA.
struct Share {
  int begin, end;
};

/// This CTA's share of all units.
__device__ inline Share share_of_all(const int* first_unit, int requests) {
  const uint32_t total = uint32_t(first_unit[requests]);  // at most 2^22 + 2^10
  return {int(total * blockIdx.x / gridDim.x), int(total * (blockIdx.x + 1) / gridDim.x)};
}

/// The request that a unit belongs to.
__device__ inline int request_of(const int* first_unit, int requests, int unit) {
  int low = 0, high = requests;  // first_unit[low] <= unit < first_unit[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first_unit[middle] <= unit ? low : high) = middle;
  }
  return low;
}

/// Where a unit's page is told: an entry of a block table, and which of the index pages it is that the entry stands
/// for.
struct Found {
  int request = -1;  ///< none: no page
  int within = 0, pages_each = 1;
  bool is_new = false;  ///< it has a token of this step
  const int32_t* at = nullptr;
  int32_t entry = -1;

  /// Asks for the entry.
  __device__ void read() {
    if (request >= 0) entry = *at;
  }
  __device__ int32_t page() const { return index_page(PageId(entry), pages_each, within).value(); }
};

/// What the warps of a CTA share.
template <class Keys>
struct ScoresTools {
  const ScoresParameters& p;
  std::byte* query;
  uint32_t* histograms;
  std::byte* pages;
  float* weights;
  uint8_t* lacks;
  int *first_unit, *totals;
  uint32_t query_address, barriers;

  __device__ __forceinline__ ScoresTools(const ScoresParameters& parameters, int q, int tile_heads, std::byte* shared,
                                         bool in_pieces = false)
      : p(parameters) {
    const ScoresShared at(q, tile_heads, in_pieces);
    query = shared;
    histograms = reinterpret_cast<uint32_t*>(shared + at.histograms);
    pages = shared + at.pages;
    weights = reinterpret_cast<float*>(shared + at.weights);
    lacks = reinterpret_cast<uint8_t*>(shared + at.lacks);
    first_unit = reinterpret_cast<int*>(shared + at.first_unit);
    totals = reinterpret_cast<int*>(shared + at.totals);
    query_address = uniform(fixed_shared_address(shared));
    barriers = fixed_shared_address(shared + at.barriers);
  }
  __device__ Barrier full(int stage) const { return {barriers + stage * 16}; }
  __device__ Barrier empty(int stage) const { return {barriers + stage * 16 + 8}; }
};

/// By a warp.
template <class Keys>
__device__ __forceinline__ void init_ring(const ScoresTools<Keys>& tools) {
  if (!elect_one()) return;
#pragma unroll 1
  for (int stage = 0; stage < tools.p.stages; ++stage) {
    tools.full(stage).init(1);
    tools.empty(stage).init(4);
  }
  publish_barriers();
}

/// The page that is the lane's unit, of up to 32 from `begin` on.
template <class Keys>
__device__ __forceinline__ Found find_units(const ScoresTools<Keys>& tools, int begin, int end) {
  const ScoresParameters& p = tools.p;
  const int* first_unit = tools.first_unit;
  const int unit = begin + int(threadIdx.x) % 32;
  Found found;
  if (unit >= end) return found;
  const int request = request_of(first_unit, p.requests, unit), page = unit - first_unit[request] - kUnitsAhead;
  if (page < 0) return found;
  found.request = request;
  const int to_end = (first_unit[request + 1] - unit) * kIndexPage - tools.lacks[request];
  found.is_new = to_end < kIndexPage + p.q;
  if (!p.index_block_table.empty()) {
    found.at = p.index_block_table.row(request) + page;
  } else {
    found.pages_each = p.page / kIndexPage;
    found.within = page % found.pages_each;
    found.at = p.block_table.row(request) + page / found.pages_each;
  }
  return found;
}

/// By a warp: asks for a page at its place in the ring, as soon as that is empty.
template <class Keys>
__device__ __forceinline__ void copy_page(const ScoresTools<Keys>& tools, uint32_t ring, const RingPlace& place,
                                          const std::byte* from) {
  constexpr int kBytes = Keys::Layout::kPageBytes;
  if (!elect_one()) return;
  tools.empty(place.stage).wait(place.parity ^ 1);
  tools.full(place.stage).expect(kBytes);
  bulk_copy_once(ring + uint32_t(place.stage * kBytes), from, kBytes, tools.full(place.stage));
}

/// The producer warp: copies the CTA's pages into the ring. Lanes look up 32 pages at a time, the next ones while those
/// before are copied. Pages with a token of this step wait for the kernel that inserts its key.
template <class Keys>
__device__ inline void copy_pages(const ScoresTools<Keys>& tools, const Share& share) {
  const ScoresParameters& p = tools.p;
  constexpr int kBytes = Keys::Layout::kPageBytes;
  const uint32_t ring = fixed_shared_address(tools.pages);
  RingPlace place{0};
  Found found = find_units(tools, share.begin, share.end);
  found.read();
  bool has_waited = false;
#pragma unroll 1
  for (int begin = share.begin; begin < share.end; begin += 32) {
    const int32_t page = found.page();
    const uint32_t are_new = __ballot_sync(~0u, found.is_new);
    uint32_t left = __ballot_sync(~0u, found.request >= 0);
    found = find_units(tools, begin + 32, share.end);
    found.read();
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      const int i = __ffs(int(left)) - 1;
      const std::byte* from = p.cache + int64_t(__shfl_sync(~0u, page, i)) * kBytes;
      if (!has_waited && (are_new >> i & 1) != 0) {
        wait_for_earlier_kernels();
        has_waited = true;
      }
      copy_page(tools, ring, place, from);
      place.advance(1, p.stages);
    }
  }
}

/// Puts the index queries of a request's rows into the B operand, and halves of their weights (add_heads) beside them;
/// padding is zero.
template <class Keys, class Tile>
__device__ inline void load_query(const ScoresTools<Keys>& tools, int request) {
  const ScoresParameters& p = tools.p;
  constexpr int kEighths = kIndexDim / 8;
  const int q = Tile::kIsAlone ? 1 : p.q;
  const auto weight = [&](int i) {
    const int head = i % Tile::kHeads, row = request * q + i / Tile::kHeads;
    return head < p.heads ? 0.5f * __ldcg(p.weights.row(row) + head) : 0.0f;
  };
  const int thread = int(threadIdx.x), weights = q * Tile::kHeads;
  const float first_weight = thread < weights ? weight(thread) : 0.0f;  // comes together with the query
  constexpr int kAtOnce = Tile::kIsAlone ? 2 : 4;                       // loads before the first store
#pragma unroll 1
  for (int first = thread; first < weights * kEighths; first += kAtOnce * Tile::kMathThreads) {
    uint2 bytes[kAtOnce];
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * Tile::kMathThreads, eighth = i % kEighths, line = i / kEighths;
      const int head = line % Tile::kHeads, row = request * q + line / Tile::kHeads;
      bytes[j] = {0, 0};
      if (line < weights && head < p.heads) {
        bytes[j] = __ldcg(reinterpret_cast<const uint2*>(p.query.row(row, head) + 8 * eighth));
      }
    }
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * Tile::kMathThreads, eighth = i % kEighths, line = i / kEighths;
      if (line >= weights) break;
      const QueryPieces at(eighth, line);
      std::byte* to = tools.query + line * kIndexDim + eighth / 4 * 4;
      *reinterpret_cast<uint32_t*>(to + at.first * 16) = bytes[j].x;
      *reinterpret_cast<uint32_t*>(to + at.second * 16) = bytes[j].y;
    }
  }
  if (thread < weights) tools.weights[thread] = first_weight;
#pragma unroll 1
  for (int i = thread + Tile::kMathThreads; i < weights; i += Tile::kMathThreads) tools.weights[i] = weight(i);
  fence_async_proxy();
}

template <class Keys, class Tile>
__device__ inline void clear_histograms(const ScoresTools<Keys>& tools) {
  if (tools.p.histograms == nullptr || threadIdx.x >= Tile::kMathThreads) return;
#pragma unroll 1
  for (int i = int(threadIdx.x); i < tools.p.q * kScoreBins / 4; i += Tile::kMathThreads) {
    reinterpret_cast<uint4*>(tools.histograms)[i] = {0, 0, 0, 0};
  }
}

/// Adds the histograms of a request's rows to those in memory, and clears them. Four bins at fixed distances from
/// one address: an address each would take registers that the kernel lacks.
template <class Keys, class Tile>
__device__ inline void merge_histograms(const ScoresTools<Keys>& tools, int request) {
  const ScoresParameters& p = tools.p;
  if (p.histograms == nullptr) return;
  uint32_t* to = p.histograms + int64_t(request) * p.q * kScoreBins;
  constexpr int kAtOnce = 4;
  const int bins = (Tile::kIsAlone ? 1 : p.q) * kScoreBins;
#pragma unroll 1
  for (int first = int(threadIdx.x); first < bins; first += kAtOnce * Tile::kMathThreads) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * Tile::kMathThreads;
      if (i >= bins) break;
      const uint32_t count = tools.histograms[i];
      if (count == 0) continue;
      atomicAdd(to + i, count);
      tools.histograms[i] = 0;
    }
  }
}

/// A row's sums over a pair of lanes, the first key's in the even one, the second's in the odd one.
__device__ __forceinline__ float add_pair(const float (&sums)[2], const KeyPlace& place) {
  const bool odd = (place.quarter & 1) != 0;
  return (odd ? sums[1] : sums[0]) + __shfl_xor_sync(~0u, odd ? sums[0] : sums[1], 1);
}
/// The sum over four lanes, each of which has a quarter of the heads of two keys: of one row, in both pairs of lanes,
/// or of two rows, the second one's in the second pair.
__device__ __forceinline__ float add_quarters(const float (&sums)[1][2], const KeyPlace& place) {
  const float pair = add_pair(sums[0], place);
  return pair + __shfl_xor_sync(~0u, pair, 2);
}
__device__ __forceinline__ float add_quarters(const float (&sums)[2][2], const KeyPlace& place) {
  const float first = add_pair(sums[0], place), second = add_pair(sums[1], place);
  const bool has_second = place.quarter >= 2;
  return (has_second ? second : first) + __shfl_xor_sync(~0u, has_second ? first : second, 2);
}

/// A math thread's place among the keys of a request's rows: of the first row that needs scores, or the one after it,
/// and from page to page.
struct KeyOfRows {
  int row;        ///< of the request
  int left;       ///< tokens that the row sees from the thread's on; 0 or less: it has no score
  uint32_t* out;  ///< ordered key of the thread's token in the row

  __device__ __forceinline__ void advance(int tokens) {
    left -= tokens;
    out += tokens;
  }
};

/// Scores a page for the rows of its request from `first` on; one row alone is row 0. Of two rows at a time a thread
/// ends up with the key of `at.row`.
template <class Keys, class Tile>
__device__ __forceinline__ void score_page(const ScoresTools<Keys>& tools, const Keys& keys, const KeyPlace& place,
                                           int tokens, int first, KeyOfRows at) {
  constexpr int kRows = Tile::kRows, kPasses = Tile::kPasses, kWidth = Tile::kWidth;
  const ScoresParameters& p = tools.p;
  if (Tile::kIsAlone) first = 0;
  const int rows = Tile::kIsAlone ? 1 : p.q;
  uint32_t tiles = tools.query_address + uint32_t(first * Tile::kHeads * kIndexDim);
  const float* weights = tools.weights + first * Tile::kHeads + 2 * place.quarter;
  uint32_t* histogram = tools.histograms + (Tile::kIsAlone ? 0 : at.row * kScoreBins);
#pragma unroll 1
  for (int row = first; row < rows; row += kRows) {
    float sums[kRows][2] = {}, dots[Tile::kTiles * kWidth / 2];
    keys.template multiply<Tile::kTiles * kWidth>(tiles, dots);
    for (int i = 0; i < Tile::kTiles; ++i) {
      add_heads<kWidth>(dots + i * kWidth / 2, weights + i * kWidth, sums[i / kPasses]);
    }
    for (int i = 0; i < kRows; ++i) {
      keys.correct(tiles + uint32_t(i * Tile::kHeads * kIndexDim), Tile::kHeads, weights + i * Tile::kHeads, place,
                   tokens, sums[i]);
    }
    const uint32_t key = score_key(add_quarters(sums, place) * keys.scale);
    if (at.left > 0 && (kRows == 1 || at.row < p.q)) {
      store_read_soon(at.out, key);
      if (p.histograms != nullptr) atomicAdd(histogram + bin_of_key(key), 1u);
    }
    tiles += uint32_t(kRows * Tile::kHeads * kIndexDim);
    weights += kRows * Tile::kHeads;
    histogram += kRows * kScoreBins;
    at.row += kRows;
    at.left += kRows;
    at.out += kRows * p.key_pitch;
  }
}

/// A math warpgroup: takes the CTA's pages in turn with the others.
template <class Keys, class Tile>
__device__ inline void score_pages(const ScoresTools<Keys>& tools, const Share& share) {
  const ScoresParameters& p = tools.p;
  const int group = int(threadIdx.x) / 128;
  const KeyPlace place(int(threadIdx.x) % 128);
  RingPlace ring{group};
  int request = request_of(tools.first_unit, p.requests, share.begin);
  int ahead = group;  // pages until it is this warpgroup's turn
#pragma unroll 1
  for (int begin = share.begin, end; begin < share.end; begin = end) {
    while (tools.first_unit[request + 1] <= begin) ++request;
    end = min(share.end, tools.first_unit[request + 1]);
    const int pages_at = tools.first_unit[request] + kUnitsAhead, end_page = end - pages_at;
    if (end_page <= 0) continue;
    load_query<Keys, Tile>(tools, request);
    const int length = (tools.first_unit[request + 1] - pages_at) * kIndexPage - tools.lacks[request];
    const int first = max(0, p.topk + p.q - length);
    const int row = first + (Tile::kRows == 2 ? place.quarter / 2 : 0);
    const int seen = Tile::kRows == 2 || place.quarter < 2 ? length - (p.q - 1) + row : -kMaxQ;
    math_barrier<Tile>();
    int page = max(0, begin - pages_at) + ahead;
    const int token = place.scored() + page * kIndexPage;
    KeyOfRows at{row, seen - token, p.keys + (int64_t(request) * p.q + row) * p.key_pitch + token};
#pragma unroll 1
    for (; page < end_page; page += Tile::kGroups) {
      tools.full(ring.stage).wait(ring.parity);
      const int tokens = length - page * kIndexPage;
      const Keys keys(tools.pages + ring.stage * Keys::Layout::kPageBytes, place, tokens);
      score_page<Keys, Tile>(tools, keys, place, tokens, first, at);
      at.advance(Tile::kGroups * kIndexPage);
      // Not before: an arrival does not wait for loads whose results nothing has used yet, and the next page may
      // overtake them.
      __syncwarp();
      if (threadIdx.x % 32 == 0) tools.empty(ring.stage).arrive();
      ring.advance(Tile::kGroups, p.stages);
    }
    ahead = page - end_page;
    math_barrier<Tile>();
    merge_histograms<Keys, Tile>(tools, request);
  }
}

template <class Keys, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) scores_kernel(const __grid_constant__ ScoresParameters p) {
  extern __shared__ __align__(1024) std::byte shared[];
  const ScoresTools<Keys> tools(p, Tile::kIsAlone ? 1 : p.q, Tile::kHeads, shared);
  const bool produces = threadIdx.x >= Tile::kMathThreads;
  if (produces) init_ring(tools);
  clear_histograms<Keys, Tile>(tools);
  // The index projection, ahead of this kernel, lets it start after its own wait: all before it has ended, and lengths,
  // tables and the keys of earlier steps are there.
  count_units(p, length_of_thread(p), tools.lacks, tools.first_unit, tools.totals);
  const Share share = share_of_all(tools.first_unit, p.requests);
  if (produces && share.begin < share.end) copy_pages(tools, share);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (!produces && share.begin < share.end) score_pages<Keys, Tile>(tools, share);
}

template <class Keys, int N, int Passes, int Rows, int Groups>
constexpr ScoresInstance scores_instance() {
  using Tile = ScoresTile<N, Passes, Rows, Groups>;
  return {scores_kernel<Keys, Tile>, Tile::kThreads, Groups};
}

// One row at a time: where there is little to read, few threads leave the next kernel room to start beside them. Four
// warpgroups of 72 registers a thread leave room for the selection and for the query of many heads (HACKING.md). Two
// rows are multiplied together.
template <class Keys, int N>
ScoresInstance scores_of_width(int q, bool is_short) {
  if (q > 1) return scores_instance<Keys, N, 1, 2, 4>();
  return is_short ? scores_instance<Keys, N, 1, 0, 2>() : scores_instance<Keys, N, 1, 0, 4>();
}

template <class Keys>
ScoresInstance scores_of(int heads, int q, bool is_short) {
  const int width = score_width(heads);
  if (score_passes(heads) == 2) {
    return width == 24 ? scores_instance<Keys, 24, 2, 1, 4>() : scores_instance<Keys, 32, 2, 1, 4>();
  }
  switch (width) {
    case 8: return scores_of_width<Keys, 8>(q, is_short);
    case 16: return scores_of_width<Keys, 16>(q, is_short);
    case 24: return scores_of_width<Keys, 24>(q, is_short);
    default: return scores_of_width<Keys, 32>(q, is_short);
  }
}

}  // namespace dsacore::cuda
