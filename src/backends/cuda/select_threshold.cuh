// The selection: from a row's histogram to the threshold. Ranges of keys become narrower; keys are marked, collected,
// exchanged between the CTAs of a row, counted again or put in order (select.cu).
#pragma once

#include "backends/cuda/select_part.cuh"

namespace dsacore::cuda::select {

inline constexpr int kShiftOfHistogram = -1;

/// Narrows a range to the one of its bins in which the last needed key lies. Bins are those of a row's histogram, or
/// 2^shift keys each from `low` on.
__device__ __forceinline__ Range narrow(const Range& range, const Bins& bins, int shift, Board& board) {
  const int counts[kBinsEach] = {int(bins.high.w), int(bins.high.z), int(bins.high.y), int(bins.high.x),
                                 int(bins.low.w),  int(bins.low.z),  int(bins.low.y),  int(bins.low.x)};
  int all = 0;
  for (int i = 0; i < kBinsEach; ++i) all += counts[i];
  int above = sum_before(all, board.totals[0]);
  if (above < range.need && range.need <= above + all) {
    int bin = 0, before = 0, count = 0;
    for (int i = 0; i < kBinsEach; ++i) {
      if (above < range.need) bin = i, before = above, count = counts[i];
      above += counts[i];
    }
    bin = kScoreBins - 1 - kBinsEach * int(threadIdx.x) - bin;
    Range found{0, 0, range.need - before, count};
    if (shift == kShiftOfHistogram) {
      found.low = first_key_of_bin(bin);
      found.high = first_key_of_bin(bin + 1);
    } else {
      found.low = range.low + (uint32_t(bin) << shift);
      found.high = min(range.high - found.low, 1u << shift) + found.low;
    }
    board.found = found;
  }
  __syncthreads();
  return board.found;
}

/// Bits by which keys of a range are moved right to make at most kScoreBins bins.
__device__ __forceinline__ int shift_of(const Range& range) {
  return max(0, 32 - __clz(int(range.high - range.low - 1)) - 11);
}

/// Moves `bits` left by one and appends whether `a` + `b` carries: for b = -c, c > 0, whether a >= c.
__device__ __forceinline__ void append_if_sum_carries(uint32_t& bits, uint32_t a, uint32_t b) {
  [[maybe_unused]] uint32_t sum;
  asm("add.cc.u32 %0, %2, %3;\n\taddc.u32 %1, %1, %1;" : "=r"(sum), "+r"(bits) : "r"(a), "r"(b));
}

/// Collects the marked keys of a warp's words, in any order; `keys` are those of the thread's word, `first` its token.
__device__ __forceinline__ void collect(const Part& part, uint32_t inside, const uint32_t* keys, int first) {
  const int lane = int(threadIdx.x) % 32, count = __reduce_add_sync(~0u, __popc(inside));
  if (count == 0) return;
  int at = 0;
  if (lane == 0) at = atomicAdd(&part.board.collected, count);
  at = __shfl_sync(~0u, at, 0);
  Order* own = part.collection(part.rank).orders;
#pragma unroll 1
  for (uint32_t lanes; (lanes = __ballot_sync(~0u, inside != 0)) != 0; inside &= inside - 1) {  // one key of each
    const int place = at + __popc(lanes & ((1u << lane) - 1)), bit = __ffs(int(inside)) - 1;
    if (inside != 0 && place < part.limit) own[place] = order_of(keys[bit], first + bit);
    at += __popc(lanes);
  }
}

/// Marks the keys above the range and in it, and counts them; collects those in it where `collects` says so. The chunks
/// 0 and 1 have been asked for; `parities` are those of the barriers, a bit each.
__device__ __forceinline__ void mark(const Part& part, const Range& range, bool collects, Counts& own,
                                     uint32_t& parities) {
  const int thread = int(threadIdx.x);
  Counts counts{0, 0};
  const int tokens = max(part.count, min(part.held, 2 * kChunk));
#pragma unroll 1
  for (int number = 0; number * kChunk < tokens; ++number) {
    const uint32_t* keys = part.chunk(number) + 32 * thread;
    const int first = number * kChunk + 32 * thread;
    part.copied(number % 2).wait(parities >> number % 2 & 1);
    parities ^= 1u << number % 2;
    uint32_t above = 0, inside = 0;
    if (first < part.count) {
#pragma unroll 2
      for (int i = 7; i >= 0; --i) {  // lanes that read together start at different banks
        const uint4 four = reinterpret_cast<const uint4*>(keys)[(i + thread) % 8];
        for (const uint32_t key : {four.w, four.z, four.y, four.x}) {
          append_if_sum_carries(above, key, 0 - range.high);
          append_if_sum_carries(inside, key, 0 - range.low);
        }
      }
      if (range.low == 0) inside = ~0u;
      const uint32_t seen = part.count - first >= 32 ? ~0u : (1u << (part.count - first)) - 1;
      above = __funnelshift_l(above, above, 4 * thread) & seen;
      inside = __funnelshift_l(inside, inside, 4 * thread) & seen & ~above;
      part.marks[first / 32] = {above, inside};
      counts.above += __popc(above);
      counts.inside += __popc(inside);
    }
    if (collects) collect(part, inside, keys, part.begin + first);
    if ((number + 2) * kChunk < tokens) {
      __syncthreads();
      if (thread == 0) part.copy_chunk(number + 2);
    }
  }
  counts.above = __reduce_add_sync(~0u, counts.above);
  counts.inside = __reduce_add_sync(~0u, counts.inside);
  if (thread % 32 == 0 && (counts.above | counts.inside) != 0) {
    atomicAdd(&own.above, counts.above);
    atomicAdd(&own.inside, counts.inside);
  }
  if (part.p.cluster > 1) fence_async_proxy();  // `exchange` sends by copies what was collected
  __syncthreads();
}

/// Sends this CTA's counts, and the keys that it collected if it could collect all, to all CTAs of the cluster.
__device__ __forceinline__ void exchange(const Part& part) {
  if (part.p.cluster == 1) return;
  const Collection own = part.collection(part.rank);
#pragma unroll 1
  for (int to = int(threadIdx.x) / 32; to < part.p.cluster; to += kWarps) {
    if (to == part.rank || !elect_one()) continue;
    copy_to_cta(address_in(shared_address(own.counts), uint32_t(to)), shared_address(own.counts), kSentAtOnce * 8,
                address_in(part.exchanged().address, uint32_t(to)));
  }
  wait_in_cluster(part.exchanged(), 0);
  const int lane = int(threadIdx.x) % 32;
  if (!__any_sync(~0u, lane < part.p.cluster && part.counts(0, lane).inside >= kSentAtOnce)) return;
  const int count = part.board.collected <= part.limit ? part.board.collected : 0;
#pragma unroll 1
  for (int i = (kSentAtOnce - 1 << part.p.cluster_bits) + int(threadIdx.x); i < count << part.p.cluster_bits;
       i += kThreads) {
    const Order* order = own.orders + (i >> part.p.cluster_bits);
    const int to = i & (part.p.cluster - 1);
    if (to == part.rank) continue;
    store_in_cluster(address_in(shared_address(order), uint32_t(to)), uint32_t(*order), uint32_t(*order >> 32));
  }
  meet_cluster(part.p);
}

/// Sends this CTA's counts of a second marking to all CTAs of the cluster.
__device__ __forceinline__ void exchange_again(const Part& part) {
  const Counts& own = part.board.again[part.rank];
  if (int(threadIdx.x) < part.p.cluster && int(threadIdx.x) != part.rank) {
    store_in_cluster(address_in(shared_address(&own), threadIdx.x), uint32_t(own.above), uint32_t(own.inside));
  }
  meet_cluster(part.p);
}

/// Clears this CTA's share of the row's histogram in memory.
__device__ __forceinline__ void clear_histogram(const Part& part) {
  const int share = kScoreBins / 4 >> part.p.cluster_bits;
#pragma unroll 1
  for (int i = int(threadIdx.x); i < share; i += kThreads) {
    reinterpret_cast<uint4*>(part.histogram())[part.rank * share + i] = {0, 0, 0, 0};
  }
}

/// Which of the cluster's collected keys a thread looks at.
struct CollectedKeys {
  int first, step, count;
  const Order* orders;

  __device__ explicit CollectedKeys(const Part& part)
      : first(int(threadIdx.x) & ((kThreads >> part.p.cluster_bits) - 1)), step(kThreads >> part.p.cluster_bits) {
    const int from = int(threadIdx.x) >> (kThreadBits - part.p.cluster_bits);
    count = part.counts(0, from).inside;
    orders = part.collection(from).orders;
  }
};

/// Clears the thread's bins in shared memory.
__device__ __forceinline__ void clear_bins(const Part& part) {
  uint4* mine = reinterpret_cast<uint4*>(part.bins) + 2 * (kThreads - 1 - int(threadIdx.x));
  mine[0] = mine[1] = {0, 0, 0, 0};
}

/// Counts the keys of a range by bins of 2^shift, which are clear: those that all CTAs collected or, at `overflow`, all
/// keys of the row. For these the CTAs' bins are added up in the row's histogram, which is clear before and after.
__device__ __forceinline__ void count_keys(const Part& part, const Range& range, int shift, bool overflow,
                                           Bins& counted) {
  const auto count_key = [&](uint32_t key) {
    if (key >= range.low && key < range.high) atomicAdd(part.bins + ((key - range.low) >> shift), 1u);
  };
  if (!overflow) {
    const CollectedKeys mine(part);
#pragma unroll 1
    for (int i = mine.first; i < mine.count; i += mine.step) count_key(key_of(mine.orders[i]));
    __syncthreads();
    counted.load(part.bins);
    return;
  }
#pragma unroll 4
  for (int i = int(threadIdx.x); i < part.count; i += kThreads) count_key(__ldcg(part.keys + i));
  meet_cluster(part.p);  // the histogram is clear
#pragma unroll 1
  for (int i = int(threadIdx.x); i < kScoreBins; i += kThreads) {
    if (part.bins[i] != 0) atomicAdd(part.histogram() + i, part.bins[i]);
  }
  __threadfence();
  meet_cluster(part.p);
  counted.load_past_l1(part.histogram());
  meet_cluster(part.p);
  clear_histogram(part);
  __threadfence();
}

/// Marks the collected keys that are selected: those above the range, and in it, where they are at most kFew or all,
/// the first `range.need`. Counts those of the CTAs before.
__device__ __forceinline__ void choose(const Part& part, const Range& range) {
  int before = 0;
  const auto select = [&](int token) {
    const int at = token - part.begin;
    if (at < 0) ++before;
    if (at >= 0 && at < part.count) atomicOr(&part.marks[at / 32].above, 1u << at % 32);
  };
  const uint32_t high = range.need == range.count ? range.low : range.high;
  const CollectedKeys mine(part);
#pragma unroll 1
  for (int i = mine.first; i < mine.count; i += mine.step) {
    const Order order = mine.orders[i];
    if (key_of(order) >= high) {
      select(token_of(order));
    } else if (key_of(order) >= range.low) {
      part.board.few_orders[atomicAdd(&part.board.few, 1)] = order;
    }
  }
  __syncthreads();
  const int few = part.board.few, bits = few <= kFew / 4 ? 3 : few <= kFew / 2 ? 2 : 1, each = 1 << bits;
  const int which = int(threadIdx.x) >> bits, part_of_key = int(threadIdx.x) & (each - 1);
  if (int(threadIdx.x) / 32 * 32 < few * each) {
    const Order order = part.board.few_orders[min(which, few - 1)];
    int larger = 0;
#pragma unroll 1
    for (int i = part_of_key; 2 * i < few; i += 8 * each) {
      const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(part.board.few_orders) + i;
#pragma unroll
      for (int j = 0; j < 8; ++j) larger += (pairs[j * each].x > order) + (pairs[j * each].y > order);
    }
    for (int distance = 1; distance < 8; distance *= 2) {
      const int other = __shfl_xor_sync(~0u, larger, distance);
      if (distance < each) larger += other;
    }
    if (part_of_key == 0 && which < few && larger < range.need) select(token_of(order));
  }
  before = __reduce_add_sync(~0u, before);
  if (threadIdx.x % 32 == 0 && before != 0) atomicAdd(&part.board.before, before);
  __syncthreads();
}

}  // namespace dsacore::cuda::select
