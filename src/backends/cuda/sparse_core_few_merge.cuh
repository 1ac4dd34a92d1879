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

/// Sends the warp's sums to the CTAs of the cluster that own them.
template <KvFormat Format, int Keys>
__device__ __forceinline__ void send_sums(const MathWarp<Format, Keys>& warp, const FewHeadsArgs& args,
                                          const FewHeadsPlace& place, uint32_t received, uint32_t received_barrier) {
  constexpr int kFloat = int(sizeof(float));
  const int heads = args.query.heads, slice = kLatent / args.plan.cluster;
#pragma unroll
  for (int h = 0; h < warp.kHeads; ++h) {
    const int head = warp.kHeads * warp.warp + h;
    const HeadStatistics s = warp.statistics(h);
    if (head >= heads || warp.lane >= args.plan.cluster) continue;
    const uint32_t to = address_in(received + uint32_t(heads * kLatent * kFloat +
                                                       (place.rank * heads + head) * int(sizeof(HeadStatistics))),
                                   uint32_t(warp.lane));
    const uint32_t barrier = address_in(received_barrier, uint32_t(warp.lane));
    send_to_cluster(to, make_float4(s.largest, s.sum, 0, 0), barrier);
    send_to_cluster(to + 16, make_float4(s.unit[0], s.unit[1], s.unit[2], s.unit[3]), barrier);
  }
#pragma unroll
  for (int block = 0; block < warp.kBlocks16; ++block) {
    const int column = warp.warp * warp.kWarpLatents + block * 16;
    const uint32_t owner = uint32_t(column / slice);
    const uint32_t barrier = address_in(received_barrier, owner);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = warp.lane / 4 + 8 * i;
      if (head >= heads) continue;
      const auto& even = warp.latent[block][0];
      const auto& odd = warp.latent[block][1];
      const int at = (place.rank * heads + head) * slice + column % slice + 4 * (warp.lane % 4);
      send_to_cluster(address_in(received + uint32_t(at * kFloat), owner),
                      make_float4(even[2 * i], odd[2 * i], even[2 * i + 1], odd[2 * i + 1]), barrier);
    }
  }
}

/// What `send_sums` of one CTA brings to one owner.
__device__ __forceinline__ uint32_t bytes_from_rank(const FewHeadsArgs& args) {
  return uint32_t(args.query.heads * (kLatent / args.plan.cluster * int(sizeof(float)) + int(sizeof(HeadStatistics))));
}

struct MergedSoftmax {
  float largest = -HUGE_VALF;
  float sum = 0;
};

/// The softmax over `count` parts of which `part(i)` gives the largest logit and the sum.
template <class Part>
__device__ __forceinline__ MergedSoftmax merge_softmax(int count, float exp2_scale, const Part& part) {
  MergedSoftmax all;
#pragma unroll 4
  for (int i = 0; i < count; ++i) all.largest = fmaxf(all.largest, part(i).largest);
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    const MergedSoftmax one = part(i);
    all.sum = fmaf(one.sum, exp2_of((one.largest - all.largest) * exp2_scale), all.sum);
  }
  return all;
}

/// Writes four latents, and from the first of a head its lse.
__device__ __forceinline__ void write_latents(const FewHeadsArgs& args, const FewHeadsPlace& place, int head, int column,
                                              float4 value, const MergedSoftmax& softmax) {
  const uint32_t low = uint32_t(to_bf16(value.x * args.k_scale).bits) | uint32_t(to_bf16(value.y * args.k_scale).bits) << 16;
  const uint32_t high = uint32_t(to_bf16(value.z * args.k_scale).bits) | uint32_t(to_bf16(value.w * args.k_scale).bits) << 16;
  *reinterpret_cast<uint2*>(args.latent.row(place.row, head) + column) = make_uint2(low, high);
  if (column == 0) {
    args.lse(place.row, head) = float(double(softmax.largest) * double(args.scale) + log(double(softmax.sum)));
  }
}

/// A row without keys.
__device__ __forceinline__ void write_empty_row(const FewHeadsArgs& args, const FewHeadsPlace& place, int thread) {
  const int heads = args.query.heads, quads = kLatent / args.plan.cluster / 4;
  for (int i = thread; i < heads * quads; i += kFewHeadsThreads) {
    const int head = i / quads, column = (place.rank * quads + i % quads) * 4;
    *reinterpret_cast<uint2*>(args.latent.row(place.row, head) + column) = make_uint2(0, 0);
    if (column == 0) args.lse(place.row, head) = -HUGE_VALF;
  }
}

__device__ __forceinline__ void add_scaled(float4& sum, float weight, const float4& value) {
  sum.x = fmaf(weight, value.x, sum.x);
  sum.y = fmaf(weight, value.y, sum.y);
  sum.z = fmaf(weight, value.z, sum.z);
  sum.w = fmaf(weight, value.w, sum.w);
}

/// One cluster's part of a slice of a row in memory: normalised latents [heads, slice], then {largest, sum} [heads].
__device__ __forceinline__ float* part_of(const FewHeadsArgs& args, const FewHeadsPlace& place, int group) {
  const int64_t floats = int64_t(args.query.heads) * (kLatent / args.plan.cluster + 2);
  return args.parts + ((place.row * args.plan.groups + group) * args.plan.cluster + place.rank) * floats;
}

/// Adds up what the cluster's CTAs sent of this CTA's slice; `thread` is one of the math threads.
__device__ __forceinline__ void merge_cluster(const FewHeadsArgs& args, const FewHeadsPlace& place, const std::byte* received,
                                              float exp2_scale, int thread) {
  const int heads = args.query.heads, slice = kLatent / args.plan.cluster, quads = slice / 4;
  const auto* sums = reinterpret_cast<const float4*>(received);
  const auto* statistics = reinterpret_cast<const HeadStatistics*>(received + heads * kLatent * int(sizeof(float)));
  for (int i = thread; i < heads * quads; i += 32 * kMathWarps) {
    const int head = i / quads, column = place.rank * slice + i % quads * 4;
    const auto part = [&](int rank) {
      const HeadStatistics& s = statistics[rank * heads + head];
      return MergedSoftmax{s.largest, s.sum};
    };
    const MergedSoftmax softmax = merge_softmax(place.active_ranks, exp2_scale, part);
    const float inverse = __fdiv_rn(1.0f, softmax.sum);
    float4 value = {};
#pragma unroll 4
    for (int rank = 0; rank < place.active_ranks; ++rank) {
      // Normalised before it is brought to size: scales may be so large that the sum alone would overflow.
      const float share = exp2_of((part(rank).largest - softmax.largest) * exp2_scale) * inverse;
      const float unit = statistics[rank * heads + head].unit[column / kGroupLatents];
      add_scaled(value, share * unit, sums[(rank * heads + head) * quads + i % quads]);
    }
    if (place.active_groups == 1) {
      write_latents(args, place, head, column, value, softmax);
    } else {
      float* to = part_of(args, place, place.group);
      __stcg(reinterpret_cast<float4*>(to) + i, value);
      if (i % quads == 0) __stcg(reinterpret_cast<float2*>(to + heads * slice) + head, make_float2(softmax.largest, softmax.sum));
    }
  }
}

/// Whether this CTA is the last of the row's clusters to leave its part of the slice; readies the count for the next run.
__device__ __forceinline__ bool last_to_arrive(const FewHeadsArgs& args, const FewHeadsPlace& place, uint32_t& last, int thread) {
  math_barrier();
  if (thread == 0) {
    uint32_t* arrivals = args.arrivals + place.row * args.plan.cluster + place.rank;
    __threadfence();
    last = atomicAdd(arrivals, 1) + 1 == uint32_t(place.active_groups);
    if (last != 0) *arrivals = 0;
    __threadfence();
  }
  math_barrier();
  return last != 0;
}

/// Adds up the clusters' parts of this CTA's slice.
__device__ __forceinline__ void merge_groups(const FewHeadsArgs& args, const FewHeadsPlace& place, float exp2_scale, int thread) {
  const int heads = args.query.heads, slice = kLatent / args.plan.cluster, quads = slice / 4;
  for (int i = thread; i < heads * quads; i += 32 * kMathWarps) {
    const int head = i / quads;
    const auto part = [&](int group) {
      const float2 s = __ldcg(reinterpret_cast<const float2*>(part_of(args, place, group) + heads * slice) + head);
      return MergedSoftmax{s.x, s.y};
    };
    const MergedSoftmax softmax = merge_softmax(place.active_groups, exp2_scale, part);
    const float inverse = __fdiv_rn(1.0f, softmax.sum);
    float4 value = {};
#pragma unroll 4
    for (int group = 0; group < place.active_groups; ++group) {
      const MergedSoftmax one = part(group);
      const float share = one.sum * exp2_of((one.largest - softmax.largest) * exp2_scale) * inverse;
      add_scaled(value, share, __ldcg(reinterpret_cast<const float4*>(part_of(args, place, group)) + i));
    }
    write_latents(args, place, head, place.rank * slice + i % quads * 4, value, softmax);
  }
}

}  // namespace dsacore::cuda
