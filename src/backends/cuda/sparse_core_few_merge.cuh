// Sparse core for few heads: from the sums of a row's CTAs to its latent and lse. First the CTAs of a cluster: each
// owns 512 / cluster latents of all heads, which the others send into its shared memory. Then, where a row has several
// clusters, through memory: the last to arrive adds up. All sums are in the order of the splits.
#pragma once

#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/shared_memory.cuh"
#include "backends/cuda/sparse_core_few_math.cuh"

namespace dsacore::cuda {

/// Where a CTA stands.
struct FewHeadsPlace {
  int row;
  int group;  ///< of the row's clusters
  int rank;   ///< in the cluster

  /// Known once the row's count of keys is.
  int keys;           ///< of this CTA
  int active_ranks;   ///< of the cluster's CTAs those that have keys: the first
  int active_groups;  ///< of the row's clusters
};

/// Where the parts of the cluster's CTAs arrive, at the same place of each CTA's shared memory: [rank, head, latent of
/// the slice], then statistics [rank, head].
struct Mailbox {
  std::byte* received;  ///< here
  uint32_t address;     ///< the same
  uint32_t barrier;     ///< counts what others send
};

/// The mailbox of one CTA of the cluster.
struct MailboxOf {
  std::byte* here;  ///< null: of another CTA
  uint32_t there, barrier_there;

  __device__ __forceinline__ MailboxOf(const Mailbox& mailbox, int owner, int rank)
      : here(owner == rank ? mailbox.received : nullptr),
        there(address_in(mailbox.address, uint32_t(owner))),
        barrier_there(there - mailbox.address + mailbox.barrier) {}

  __device__ __forceinline__ void send(int at, float4 value) const {
    if (here != nullptr) {
      *reinterpret_cast<float4*>(here + at) = value;
    } else {
      send_to_cluster(there + uint32_t(at), value, barrier_there);
    }
  }
};

/// Sends the warp's sums to the CTAs of the cluster that own them.
template <KvFormat Format, int Keys>
__device__ __forceinline__ void send_sums(const MathWarp<Format, Keys>& warp, const FewHeadsArgs& args, int rank,
                                          const Mailbox& mailbox) {
  constexpr int kFloat = int(sizeof(float)), kColumns = 32;  // of the smallest slice
  const int heads = args.query.heads, slice_bits = args.slice_bits, column_mask = (1 << slice_bits) - 1;
  const HeadStatistics s = warp.statistics();
  if (warp.head() < heads && warp.lane % 16 < args.plan.cluster) {
    const MailboxOf box(mailbox, warp.lane % 16, rank);
    const int at = heads * kLatent * kFloat + (rank * heads + warp.head()) * int(sizeof(HeadStatistics));
    box.send(at, make_float4(s.largest, s.sum, 0, 0));
    box.send(at + 16, make_float4(s.unit[0], s.unit[1], s.unit[2], s.unit[3]));
  }
  const int first_head = warp.lane / 4;
#pragma unroll
  for (int half = 0; half < warp.kWarpLatents / kColumns; ++half) {
    const int column = warp.warp * warp.kWarpLatents + half * kColumns;
    const MailboxOf box(mailbox, column >> slice_bits, rank);
    const int at =
        (((rank * heads + first_head) << slice_bits) + (column & column_mask) + 4 * (warp.lane % 4)) * kFloat;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (first_head + 8 * i >= heads) continue;
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const auto& even = warp.latent[2 * half + block][0];
        const auto& odd = warp.latent[2 * half + block][1];
        box.send(at + ((8 * i << slice_bits) + 16 * block) * kFloat,
                 make_float4(even[2 * i], odd[2 * i], even[2 * i + 1], odd[2 * i + 1]));
      }
    }
  }
}

/// What `send_sums` of one CTA brings to one owner.
__device__ __forceinline__ uint32_t bytes_from_rank(const FewHeadsArgs& args) {
  return uint32_t(args.query.heads * ((int(sizeof(float)) << args.slice_bits) + int(sizeof(HeadStatistics))));
}

/// A row without keys; `thread` is one of the math threads.
__device__ __forceinline__ void write_empty_row(const FewHeadsArgs& args, const FewHeadsPlace& place, int thread) {
  const int heads = args.query.heads, quads = 1 << args.slice_bits >> 2;
  for (int i = thread; i < heads * quads; i += 32 * kMathWarps) {
    const int head = i / quads, column = (place.rank * quads + i % quads) * 4;
    *reinterpret_cast<uint2*>(args.latent.row(place.row, head) + column) = make_uint2(0, 0);
    if (column == 0) args.lse(place.row, head) = -HUGE_VALF;
  }
}

/// The math threads of a CTA, when its tiles are done. A thread first has a head (thread / 16) and one part of it
/// (thread % 16), then four latents of all parts at a time. What addresses need is worked out before the parts arrive.
template <class Shared>
struct Merge {
  Shared& shared;
  const FewHeadsArgs& args;
  const FewHeadsPlace& place;
  float exp2_scale;
  int thread;
  int heads;
  int part_size;     ///< floats of a part
  int64_t own_part;  ///< floats before this rank's part of the row's first group
  int own_column;    ///< of the slice
  BFloat16* latent;  ///< of the row, at the slice
  MergedHead softmax;

  __device__ __forceinline__ Merge(Shared& s, const FewHeadsArgs& a, const FewHeadsPlace& p, float scale, int t)
      : shared(s),
        args(a),
        place(p),
        exp2_scale(scale),
        thread(t),
        heads(a.query.heads),
        part_size(int(part_floats(a.query.heads, a.plan.cluster))),
        own_part(int64_t(p.row * a.plan.groups * a.plan.cluster + p.rank) * part_size),
        own_column(p.rank << a.slice_bits),
        latent(a.latent.row(p.row) + own_column) {}

  /// Adds up what the cluster's CTAs sent of this CTA's slice.
  __device__ __forceinline__ void cluster(std::byte* received) {
    const auto* sums = reinterpret_cast<const float4*>(received);
    auto* statistics = reinterpret_cast<HeadStatistics*>(received + heads * kLatent * int(sizeof(float)));
    const bool whole_row = place.active_groups == 1;
    const int head = thread / 16, part = thread % 16;
    const bool counts = head < heads && part < place.active_ranks;
    HeadStatistics* mine = statistics + (counts ? part * heads + head : 0);
    const float2 own = counts ? *reinterpret_cast<const float2*>(mine) : make_float2(-HUGE_VALF, 0);
    softmax.largest = half_warp_max(own.x);
    const float share = exp2_approx((own.x - softmax.largest) * exp2_scale);
    softmax.sum = half_warp_sum(own.y * share);
    // Units become weights. Normalised first: scales may be so large that a sum of products alone would overflow.
    if (counts) {
      const float normalised = __fdividef(share, softmax.sum);
      float4& units = *reinterpret_cast<float4*>(mine->unit);
      units = make_float4(units.x * normalised, units.y * normalised, units.z * normalised, units.w * normalised);
      if (part == 0 && !whole_row) __stcg(softmax_of(place.group) + head, make_float2(softmax.largest, softmax.sum));
    }
    math_barrier();
    const int quad_bits = args.slice_bits - 2;
#pragma unroll 1
    for (int item = thread; item < heads << quad_bits; item += 32 * kMathWarps) {
      const int item_head = item >> quad_bits, column = (item & ((1 << quad_bits) - 1)) * 4;
      const float* weight = &statistics[item_head].unit[(own_column + column) / kGroupLatents];
      const float4* from = sums + item;
      float4 value = {};
#pragma unroll 4
      for (int rank = 0; rank < place.active_ranks; ++rank) {
        add_scaled(value, weight[rank * heads * int(sizeof(HeadStatistics) / sizeof(float))],
                   from[rank * heads << quad_bits]);
      }
      if (whole_row) {
        write(item_head, column, value);
      } else {
        __stcg(reinterpret_cast<float4*>(part_of(place.group)) + item, value);
      }
    }
    if (whole_row && counts && part == 0 && place.rank == 0) write_lse(head);
  }

  /// Whether this CTA is the last of the row's clusters to leave its part of the slice; readies the count for the next
  /// run.
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

  /// Adds up the clusters' parts of this CTA's slice. Each thread merges the softmax for itself, in the shadow of the
  /// parts.
  __device__ __forceinline__ void groups() {
    const int quad_bits = args.slice_bits - 2;
#pragma unroll 1
    for (int item = thread; item < heads << quad_bits; item += 32 * kMathWarps) {
      const int head = item >> quad_bits, column = (item & ((1 << quad_bits) - 1)) * 4;
      float4 parts[kMaxGroups];
      float2 ones[kMaxGroups];
#pragma unroll
      for (int group = 0; group < kMaxGroups; ++group) {
        const bool counts = group < place.active_groups;
        ones[group] = counts ? __ldcg(softmax_of(group) + head) : make_float2(-HUGE_VALF, 0);
        parts[group] = counts ? __ldcg(reinterpret_cast<const float4*>(part_of(group)) + item) : float4{};
      }
      softmax = {-HUGE_VALF, 0};
#pragma unroll
      for (const float2& one : ones) softmax.largest = fmaxf(softmax.largest, one.x);
#pragma unroll
      for (float2& one : ones) {
        one.y *= exp2_approx((one.x - softmax.largest) * exp2_scale);
        softmax.sum += one.y;
      }
      float4 value = {};
#pragma unroll
      for (int group = 0; group < kMaxGroups; ++group)
        add_scaled(value, __fdividef(ones[group].y, softmax.sum), parts[group]);
      write(head, column, value);
      if (own_column + column == 0) write_lse(head);
    }
  }

 private:
  /// One cluster's part of this CTA's slice in memory.
  __device__ __forceinline__ float* part_of(int group) const {
    return args.parts + own_part + group * args.plan.cluster * part_size;
  }
  __device__ __forceinline__ float2* softmax_of(int group) const {
    return reinterpret_cast<float2*>(part_of(group) + (heads << args.slice_bits));
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
    *reinterpret_cast<uint2*>(latent + head * args.latent.stride(1) + column) = *reinterpret_cast<const uint2*>(pairs);
  }
  __device__ __forceinline__ void write_lse(int head) const {
    args.lse(place.row, head) = float(double(softmax.largest) * double(args.scale) + double(__logf(softmax.sum)));
  }
};

}  // namespace dsacore::cuda
