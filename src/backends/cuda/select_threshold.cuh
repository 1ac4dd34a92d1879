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
  const Range found = board.found;
  return {uniform(found.low), uniform(found.high), uniform(found.need), uniform(found.count)};
}

/// Bits by which keys of a range are moved right to make at most kScoreBins bins.
__device__ __forceinline__ int shift_of(const Range& range) {
  return max(0, 32 - __clz(int(range.high - range.low - 1)) - 11);
}

/// Collects the marked keys of a thread's word, in any order; `keys` are those of the word, `first` its token.
__device__ __forceinline__ void collect(const Part& part, uint32_t inside, const uint32_t* keys, int first) {
  if (inside == 0) return;
  Order* own = part.collection(part.rank).orders;
  int place = atomicAdd(&part.board.collected, __popc(inside));
#pragma unroll 1
  for (; inside != 0; inside &= inside - 1, ++place) {
    const int bit = __ffs(int(inside)) - 1;
    if (place < part.limit) own[place] = order_of(keys[bit], first + bit);
  }
}

/// Marks the keys above the range and in it, and counts them; collects those in it where `collects` says so. The chunks
/// 0 and 1 have been asked for; `parities` are those of the barriers, a bit each.
__device__ __forceinline__ void mark(const Part& part, const Range& range, bool collects, Counts& own,
                                     uint32_t& parities) {
  const int thread = int(threadIdx.x);
  Counts counts{0, 0};
#pragma unroll 1
  for (int number = 0; number * kChunk < part.count; ++number) {
    const uint32_t* keys = part.chunk(number) + 32 * thread;
    const int first = number * kChunk + 32 * thread, left = part.count - first;
    part.copied(number % 2).wait(parities >> number % 2 & 1);
    parities ^= 1u << number % 2;
    Marks mine{0, 0};
    if (left > 0) {
      for (int i = 0; i < 8; ++i) {  // lanes that read together start at different banks
        const uint4 four = reinterpret_cast<const uint4*>(keys)[(i + thread) % 8];
        const uint32_t values[4] = {four.x, four.y, four.z, four.w};
        for (int j = 0; j < 4; ++j) {
          if (values[j] >= range.high) mine.above |= 1u << (4 * i + j);
          if (values[j] >= range.low) mine.inside |= 1u << (4 * i + j);
        }
      }
      const uint32_t seen = left >= 32 ? ~0u : (1u << left) - 1;
      mine.above = __funnelshift_l(mine.above, mine.above, 4 * thread) & seen;
      mine.inside = __funnelshift_l(mine.inside, mine.inside, 4 * thread) & seen & ~mine.above;
      part.marks[first / 32] = mine;
      counts.above += __popc(mine.above);
      counts.inside += __popc(mine.inside);
    }
    if (collects) collect(part, mine.inside, keys, part.begin + first);
    if ((number + 2) * kChunk < part.count) {
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
/// keys of the row. For these the CTAs' bins are added up in the row's histogram.
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
  clear_histogram(part);  // all CTAs have read what it held
  __threadfence();
  meet_cluster(part.p);
#pragma unroll 1
  for (int i = int(threadIdx.x); i < kScoreBins; i += kThreads) {
    if (part.bins[i] != 0) atomicAdd(part.histogram() + i, part.bins[i]);
  }
  __threadfence();
  meet_cluster(part.p);
  counted.load_past_l1(part.histogram());
  meet_cluster(part.p);
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
  const int lane = int(threadIdx.x) % 32;
  const CollectedKeys mine(part);
#pragma unroll 1
  for (int i = mine.first; __any_sync(~0u, i < mine.count); i += mine.step) {
    const Order order = i < mine.count ? mine.orders[i] : 0;
    const bool is_selected = i < mine.count && key_of(order) >= high;
    const bool is_inside = i < mine.count && key_of(order) < high && key_of(order) >= range.low;
    if (is_selected) select(token_of(order));
    const uint32_t inside = __ballot_sync(~0u, is_inside);
    if (inside == 0) continue;
    int at = 0;
    if (lane == 0) at = atomicAdd(&part.board.few, __popc(inside));
    at = __shfl_sync(~0u, at, 0) + __popc(inside & ((1u << lane) - 1));
    if (is_inside) part.board.few_orders[at] = order - (Order(range.low) << 32);
  }
  __syncthreads();
  const int few = uniform(part.board.few), bits = few <= kFew / 4 ? 3 : few <= kFew / 2 ? 2 : 1, each = 1 << bits;
  const int which = int(threadIdx.x) >> bits, part_of_key = int(threadIdx.x) & (each - 1);
  if (int(threadIdx.x) / 32 * 32 < few * each) {
    const Order order = part.board.few_orders[min(which, few - 1)];
    int larger = 0;
#pragma unroll 1
    for (int i = part_of_key; 2 * i < few; i += 8 * each) {
      const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(part.board.few_orders) + i;
      ulonglong2 others[8];
      for (int j = 0; j < 8; ++j) others[j] = pairs[j * each];
      // From the lowest of their range on orders are below 2^63: the sign of a difference tells which one is larger.
      for (int j = 0; j < 8; ++j) larger += int((order - others[j].x) >> 63) + int((order - others[j].y) >> 63);
    }
    for (int distance = 1; distance < 8; distance *= 2) {
      const int other = __shfl_xor_sync(~0u, larger, distance);
      if (distance < each) larger += other;
    }
    if (part_of_key == 0 && which < few && larger < range.need) select(token_of(order));
  }
  before = __reduce_add_sync(~0u, before);
  if (lane == 0 && before != 0) atomicAdd(&part.board.before, before);
  __syncthreads();
}

}  // namespace dsacore::cuda::select
