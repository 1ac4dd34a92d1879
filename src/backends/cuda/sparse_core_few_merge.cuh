// Sparse core for few heads: from the sums of a row's CTAs to its latent and lse. First the CTAs of a cluster: each owns
// 512 / cluster latents of all heads, which the others send into its shared memory. Then, where a row has several
// clusters, through memory: the last to arrive adds up. All sums are in the order of the splits.
#pragma once

#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/shared_memory.cuh"
#include "backends/cuda/sparse_core_few_math.cuh"

namespace dsacore::cuda {

/// Where a CTA stands.
struct FewHeadsPlace {
  int64_t row;
  int group;  ///< of the row's clusters
  int rank;   ///< in the cluster
  int keys;   ///< of this CTA
  int active_ranks;   ///< of the cluster's CTAs those that have keys: the first
  int active_groups;  ///< of the row's clusters
};

/// Hands 16 bytes to the CTA of that rank, at the same place of its shared memory.
struct SumSender {
  std::byte* received;        ///< here
  uint32_t received_address;  ///< the same
  uint32_t barrier;           ///< that counts what others send
  int rank;                   ///< of this CTA

  __device__ __forceinline__ void send(int owner, int at, float4 value) const {
    if (owner == rank) {
      *reinterpret_cast<float4*>(received + at) = value;
    } else {
      send_to_cluster(address_in(received_address + uint32_t(at), uint32_t(owner)), value, address_in(barrier, uint32_t(owner)));
    }
  }
};

/// Sends the warp's sums to the CTAs of the cluster that own them: [rank, head, latent of the slice], then statistics
/// [rank, head].
template <KvFormat Format, int Keys>
__device__ __forceinline__ void send_sums(const MathWarp<Format, Keys>& warp, const FewHeadsArgs& args,
                                          const SumSender& sender) {
  constexpr int kFloat = int(sizeof(float));
  const int heads = args.query.heads, slice_bits = args.slice_bits;
  const HeadStatistics s = warp.statistics();
  if (warp.head() < heads && warp.lane % 16 < args.plan.cluster) {
    const int at = heads * kLatent * kFloat + (sender.rank * heads + warp.head()) * int(sizeof(HeadStatistics));
    sender.send(warp.lane % 16, at, make_float4(s.largest, s.sum, 0, 0));
    sender.send(warp.lane % 16, at + 16, make_float4(s.unit[0], s.unit[1], s.unit[2], s.unit[3]));
  }
#pragma unroll
  for (int block = 0; block < warp.kBlocks16; ++block) {
    const int column = warp.warp * warp.kWarpLatents + block * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = warp.lane / 4 + 8 * i;
      if (head >= heads) continue;
      const auto& even = warp.latent[block][0];
      const auto& odd = warp.latent[block][1];
      const int at = ((sender.rank * heads + head) << slice_bits) + (column & ((1 << slice_bits) - 1)) + 4 * (warp.lane % 4);
      sender.send(column >> slice_bits, at * kFloat, make_float4(even[2 * i], odd[2 * i], even[2 * i + 1], odd[2 * i + 1]));
    }
  }
}

/// What `send_sums` of one CTA brings to one owner.
__device__ __forceinline__ uint32_t bytes_from_rank(const FewHeadsArgs& args) {
  return uint32_t(args.query.heads * ((int(sizeof(float)) << args.slice_bits) + int(sizeof(HeadStatistics))));
}

/// A row without keys.
__device__ __forceinline__ void write_empty_row(const FewHeadsArgs& args, const FewHeadsPlace& place, int thread) {
  const int heads = args.query.heads, quads = 1 << args.slice_bits >> 2;
  for (int i = thread; i < heads * quads; i += kFewHeadsThreads) {
    const int head = i / quads, column = (place.rank * quads + i % quads) * 4;
    *reinterpret_cast<uint2*>(args.latent.row(place.row, head) + column) = make_uint2(0, 0);
    if (column == 0) args.lse(place.row, head) = -HUGE_VALF;
  }
}

/// The math threads of a CTA, when its tiles are done. A thread first has a head (thread / 16) and one part of it
/// (thread % 16), later four latents of all parts at a time.
template <class Shared>
struct Merge {
  Shared& shared;
  const FewHeadsArgs& args;
  const FewHeadsPlace& place;
  float exp2_scale;
  int thread;

  __device__ __forceinline__ int heads() const { return args.query.heads; }
  __device__ __forceinline__ int head() const { return thread / 16; }
  __device__ __forceinline__ int part() const { return thread % 16; }

  /// Adds up what the cluster's CTAs sent of this CTA's slice: sums, then statistics, both [rank, heads].
  __device__ __forceinline__ void cluster(std::byte* received) const {
    const auto* sums = reinterpret_cast<const float4*>(received);
    auto* statistics = reinterpret_cast<HeadStatistics*>(received + heads() * kLatent * int(sizeof(float)));
    const bool whole_row = place.active_groups == 1;
    const bool counts = head() < heads() && part() < place.active_ranks;
    HeadStatistics* mine = statistics + (counts ? part() * heads() + head() : 0);
    MergedHead softmax = {counts ? mine->largest : -HUGE_VALF, counts ? mine->sum : 0.0f};
    // Units become weights. Normalised first: scales may be so large that a sum of products alone would overflow.
    const float share = share_of(softmax) * __frcp_rn(softmax.sum);
    if (counts) {
#pragma unroll
      for (float& unit : mine->unit) unit *= share;
      if (part() == 0) finish_softmax(softmax, whole_row);
    }
    math_barrier();
    for_slice([&](int item, int head, int column) {
      float4 value = {};
#pragma unroll 4
      for (int rank = 0; rank < place.active_ranks; ++rank) {
        const int from = rank * heads() + head;
        add_scaled(value, statistics[from].unit[column / kGroupLatents], sums[(rank * heads() << quad_bits()) + item]);
      }
      if (whole_row) {
        write(head, column, value);
      } else {
        __stcg(reinterpret_cast<float4*>(part_of(place.group)) + item, value);
      }
    });
  }

  /// Whether this CTA is the last of the row's clusters to leave its part of the slice; readies the count for the next run.
  __device__ __forceinline__ bool last_to_arrive() const {
    math_barrier();
    if (thread == 0) {
      uint32_t* arrivals = args.arrivals + place.row * args.plan.cluster + place.rank;
      __threadfence();
      shared.last = atomicAdd(arrivals, 1) + 1 == uint32_t(place.active_groups);
      if (shared.last != 0) *arrivals = 0;
      __threadfence();
    }
    math_barrier();
    return shared.last != 0;
  }

  /// Adds up the clusters' parts of this CTA's slice.
  __device__ __forceinline__ void groups() const {
    const bool counts = head() < heads() && part() < place.active_groups;
    MergedHead softmax = {-HUGE_VALF, 0};
    if (counts) {
      const float2 one = __ldcg(softmax_of(part()) + head());
      softmax = {one.x, one.y};
    }
    const float own_sum = softmax.sum;
    const float share = share_of(softmax) * own_sum * __frcp_rn(softmax.sum);
    if (counts) shared.shares[part()][head()] = share;
    if (counts && part() == 0) finish_softmax(softmax, true);
    math_barrier();
    for_slice([&](int item, int head, int column) {
      float4 value = {};
#pragma unroll 4
      for (int group = 0; group < place.active_groups; ++group) {
        add_scaled(value, shared.shares[group][head], __ldcg(reinterpret_cast<const float4*>(part_of(group)) + item));
      }
      write(head, column, value);
    });
  }

 private:
  __device__ __forceinline__ int quad_bits() const { return args.slice_bits - 2; }

  /// One cluster's part of this CTA's slice in memory.
  __device__ __forceinline__ float* part_of(int group) const {
    const int64_t index = (place.row * args.plan.groups + group) * args.plan.cluster + place.rank;
    return args.parts + index * part_floats(heads(), args.plan.cluster);
  }
  __device__ __forceinline__ float2* softmax_of(int group) const {
    return reinterpret_cast<float2*>(part_of(group) + (heads() << args.slice_bits));
  }

  /// Merges the softmax of the 16 parts of a head; returns what this part's p must be multiplied with.
  __device__ __forceinline__ float share_of(MergedHead& softmax) const {
    const float own = softmax.largest;
    softmax.largest = half_warp_max(own);
    const float share = exp2_of((own - softmax.largest) * exp2_scale);
    softmax.sum = half_warp_sum(softmax.sum * share);
    return share;
  }

  /// The head's lse, or what other clusters must know of its softmax.
  __device__ __forceinline__ void finish_softmax(const MergedHead& softmax, bool whole_row) const {
    if (!whole_row) {
      __stcg(softmax_of(place.group) + head(), make_float2(softmax.largest, softmax.sum));
    } else if (place.rank == 0) {
      args.lse(place.row, head()) = float(double(softmax.largest) * double(args.scale) + double(__logf(softmax.sum)));
    }
  }

  /// Calls `f(item, head, column)` for this thread's quads of latents in the slice; column counts in the whole latent.
  template <class F>
  __device__ __forceinline__ void for_slice(const F& f) const {
#pragma unroll 1
    for (int item = thread; item < heads() << quad_bits(); item += 32 * kMathWarps) {
      f(item, item >> quad_bits(), (place.rank << args.slice_bits) + (item & ((1 << quad_bits()) - 1)) * 4);
    }
  }

  static __device__ __forceinline__ void add_scaled(float4& sum, float weight, const float4& value) {
    sum.x = fmaf(weight, value.x, sum.x);
    sum.y = fmaf(weight, value.y, sum.y);
    sum.z = fmaf(weight, value.z, sum.z);
    sum.w = fmaf(weight, value.w, sum.w);
  }

  __device__ __forceinline__ void write(int head, int column, const float4& value) const {
    __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(value.x * args.k_scale, value.y * args.k_scale),
                               __floats2bfloat162_rn(value.z * args.k_scale, value.w * args.k_scale)};
    *reinterpret_cast<uint2*>(args.latent.row(place.row, head) + column) = *reinterpret_cast<const uint2*>(pairs);
  }
};

}  // namespace dsacore::cuda
