// Step 9 where more ordered keys are made than L2 keeps: the score kernel of one row a request, in pieces.
//
// All pages are dealt to all CTAs as in scores_kernel.cuh, but piece by piece, so that requests are through one after
// the other. The selection starts beside the first piece; of a row it begins when the row's pages have been counted in
// `scored`, and gives the row's keys up, which L2 then need not write. At 64 x 131072 that is 33 MB, 22 of 275 us, and
// the selection's own 11.
#pragma once

#include "backends/cuda/ptx/flags.cuh"
#include "backends/cuda/scores_kernel.cuh"

namespace dsacore::cuda {

/// A warpgroup's tile as in scores_kernel.cuh, of one row, and two warps that copy pages, by turns. One alone needs
/// some 350 clk a page, for a dozen dependent steps, of the 490 in which a page comes: where it fell behind at a
/// piece's start it stayed behind, at 1100.
template <int N>
struct PiecesTile : ScoresTile<N, 1, 0, 4> {
  static constexpr int kProducers = 2;
  static constexpr int kThreads = PiecesTile::kMathThreads + 32 * kProducers;
};

/// What the warps of a CTA share, and its share of every piece.
template <class Keys>
struct PiecesTools : ScoresTools<Keys> {
  Share* shares;

  __device__ __forceinline__ PiecesTools(const ScoresParameters& parameters, int tile_heads, std::byte* shared)
      : ScoresTools<Keys>(parameters, 1, tile_heads, shared, true),
        shares(reinterpret_cast<Share*>(shared + ScoresShared(1, tile_heads, true).shares)) {}
  __device__ int pieces() const {
    return (this->first_unit[this->p.requests] + (1 << this->p.piece_bits) - 1) >> this->p.piece_bits;
  }
};

/// Makes the shares: those of all CTAs and pieces are as large, or larger by one. By all threads.
template <class Keys>
__device__ __forceinline__ void deal_units(const PiecesTools<Keys>& tools) {
  const uint32_t total = uint32_t(tools.first_unit[tools.p.requests]), pieces = uint32_t(max(1, tools.pieces()));
  if (threadIdx.x < pieces) {
    const uint32_t parts = pieces * gridDim.x, part = threadIdx.x * gridDim.x + blockIdx.x;
    const uint32_t each = total / parts, more = total - each * parts;
    const int begin = int(part * each + min(part, more));
    tools.shares[threadIdx.x] = {begin, begin + int(each + (part < more))};
  }
  __syncthreads();
}

/// The CTA's units from `unit` on: what is left of a share, or the next one; none: there are no more.
template <class Keys>
__device__ __forceinline__ Share units_from(const PiecesTools<Keys>& tools, int unit) {
#pragma unroll 1
  for (int piece = 0; piece < tools.pieces(); ++piece) {
    const Share share = tools.shares[piece];
    const int begin = max(unit, share.begin);
    if (begin < share.end) return {begin, share.end};
  }
  return {0, 0};
}

/// A producer warp: copies every second of the CTA's pages into the ring (`copy_pages`).
template <class Keys, class Tile>
__device__ inline void copy_pages_of_pieces(const PiecesTools<Keys>& tools) {
  const ScoresParameters& p = tools.p;
  constexpr int kBytes = Keys::Layout::kPageBytes;
  const uint32_t ring = fixed_shared_address(tools.pages);
  const int which = uniform_warp() % Tile::kProducers, lane = int(threadIdx.x) % 32;
  RingPlace place{which};
  int pages = 0;  // of both warps, so far
  bool has_waited = false;
#pragma unroll 1
  for (int piece = 0; piece < tools.pieces(); ++piece) {
    const Share share = tools.shares[piece];
    Found found = find_units(tools, share.begin, share.end);
    found.read();
#pragma unroll 1
    for (int begin = share.begin; begin < share.end; begin += 32) {
      const int32_t page = found.page();
      const uint32_t are_new = __ballot_sync(~0u, found.is_new);
      const uint32_t are_pages = __ballot_sync(~0u, found.request >= 0);
      const int number = pages + __popc(are_pages & ((1u << lane) - 1));
      uint32_t left = __ballot_sync(~0u, found.request >= 0 && number % Tile::kProducers == which);
      pages += __popc(are_pages);
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
        place.advance(Tile::kProducers, p.stages);
      }
    }
  }
}

/// A math warpgroup: takes the CTA's pages in turn with the others, and has the selection told of them.
template <class Keys, class Tile>
__device__ inline void score_pieces(const PiecesTools<Keys>& tools) {
  const ScoresParameters& p = tools.p;
  const int group = int(threadIdx.x) / 128;
  const KeyPlace place(int(threadIdx.x) % 128);
  RingPlace ring{group};
  int ahead = group;  // pages until it is this warpgroup's turn
  int request = 0, unit = 0;
  // Registers are few: what shared memory tells is read again for every request.
#pragma unroll 1
  while (true) {
    const Share units = units_from(tools, unit);
    if (units.begin >= units.end) break;
    if (tools.first_unit[request + 1] <= units.begin) request = request_of(tools.first_unit, p.requests, units.begin);
    unit = min(units.end, tools.first_unit[request + 1]);
    const int pages_at = tools.first_unit[request] + kUnitsAhead;
    const int first_page = max(0, units.begin - pages_at), end_page = unit - pages_at;
    if (end_page <= 0) continue;
    load_query<Keys, Tile>(tools, request);
    const int length = (tools.first_unit[request + 1] - pages_at) * kIndexPage - tools.lacks[request];
    if (threadIdx.x == 0) tools.totals[0] = end_page - first_page;  // for itself
    math_barrier<Tile>();
    // Tokens of the request from a page on: from this warpgroup's next, and from the first that is not the CTA's.
    int tokens = length - (first_page + ahead) * kIndexPage;
    const int end_tokens = length - end_page * kIndexPage, token = place.scored() + length - tokens;
    KeyOfRows at{0, (place.quarter < 2 ? length : 0) - token, p.keys + int64_t(request) * p.key_pitch + token};
#pragma unroll 1
    for (; tokens > end_tokens; tokens -= Tile::kGroups * kIndexPage) {
      tools.full(ring.stage).wait(ring.parity);
      const Keys keys(tools.pages + ring.stage * Keys::Layout::kPageBytes, place, tokens);
      score_page<Keys, Tile>(tools, keys, place, tokens, 0, at);
      at.advance(Tile::kGroups * kIndexPage);
      __syncwarp();  // as in `score_pages`
      if (threadIdx.x % 32 == 0) tools.empty(ring.stage).arrive();
      ring.advance(Tile::kGroups, p.stages);
    }
    ahead = (end_tokens - tokens) / kIndexPage;
    math_barrier<Tile>();
    merge_histograms<Keys, Tile>(tools, request);
    unit = tools.first_unit[request + 1] - (end_tokens + tools.lacks[request]) / kIndexPage;
    math_barrier<Tile>();  // keys and histograms of all
    if (threadIdx.x == 0) add_release(p.scored + request, uint32_t(tools.totals[0]));
  }
}

/// As many threads as leave each 64 registers: 18 warps of 64, and the query of many heads beside them (HACKING.md).
inline constexpr int kThreadsOf64Registers = 1024;

template <class Keys, class Tile>
__global__ void __launch_bounds__(kThreadsOf64Registers, 1)
    scores_in_pieces(const __grid_constant__ ScoresParameters p) {
  extern __shared__ __align__(1024) std::byte shared[];
  const PiecesTools<Keys> tools(p, Tile::kHeads, shared);
  if (threadIdx.x / 32 == Tile::kMathThreads / 32) init_ring(tools);
  clear_histograms<Keys, Tile>(tools);
  count_units(p, length_of_thread(p), tools.lacks, tools.first_unit, tools.totals);
  deal_units(tools);
  const bool produces = threadIdx.x >= Tile::kMathThreads;
  if (produces) copy_pages_of_pieces<Keys, Tile>(tools);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (!produces) score_pieces<Keys, Tile>(tools);
}

}  // namespace dsacore::cuda
