// Step 3 of the index front: the parts of the sums meet, are added as (0 + 1) + (2 + 3), and give the codes of a head.
//
// A CTA finishes eights of tokens, or a pair of tokens of every eight. A warp has 16 of the head's 128 values of every
// token, in every CTA the same ones: its fragment goes as it is to the same warp and lane of the CTA that finishes the
// tokens, whose own part stays in registers.
#pragma once

#include "backends/cuda/index_projection_place.cuh"

namespace dsacore::cuda {

template <int Tokens, int PartBlocks>
class Exchange {
  using Place = FrontPlace<Tokens, PartBlocks>;
  using Shape = typename Place::Shape;
  static constexpr int kTurns = Shape::kTurns;

 public:
  __device__ __forceinline__ Exchange(const FrontArguments& a, const Place& place, int first, int live, int head)
      : a_(a),
        place_(place),
        lane_(int(threadIdx.x) % 32),
        warp_(int(threadIdx.x) / 32),
        first_(first),
        live_(live),
        head_(head),
        inbox_(Shape::kInboxAt + uint32_t(warp_ * kTurns * Shape::kTurnBytes +
                                          (Shape::kWholeEights ? lane_ : lane_ / 4) * int(sizeof(float4)))) {
    int turns = 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) turns += has_live(turn, int(place.rank));
    receives_ = turns > 0;
    if (receives_ && threadIdx.x == 0) {
      place.inbox_full().expect(uint32_t(turns * (kParts - 1) * kFrontWarps * Shape::kTurnBytes));
    }
    if (writes_weight() && finishes(warp_)) wv_ = a.output.wv(first + token(warp_), head);
  }

  /// Everything that another CTA finishes. Leaves `sums` arranged for `finish`.
  __device__ __forceinline__ void send(float (&sums)[Tokens / 2]) const {
    if constexpr (Shape::kWholeEights) {
      arrange(sums);
#pragma unroll
      for (int i = 1; i < kParts; ++i) send_to(sums, i);  // every CTA in another order
    } else {
      const int i = lane_ % 4 ^ int(place_.rank);
      if (i != 0) send_to(sums, i);
    }
  }

  /// Adds the parts of the tokens that this CTA finishes, and quantises the head.
  __device__ __forceinline__ void finish(const float (&sums)[Tokens / 2], uint32_t parity) const {
    if (!receives_) return;
    auto* maxima =
        reinterpret_cast<float*>(place_.shared + Shape::kMaximaAt) + lane_ / 4 * kFrontWarps;  // of token and warp
    const View<uint8_t, 3>& index_query = a_.output.index_query;
    uint8_t* to = index_query.row(first_ + token(0), head_) + warp_ * 16 + lane_ % 2 * 8 + lane_ % 4 / 2 * 4;
    const int64_t turn_codes = (token(1) - token(0)) * index_query.stride(0);
    wait_in_cluster(place_.inbox_full(), parity);
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn, to += turn_codes, maxima += kEight * kFrontWarps) {
      // Of token lane / 4: values 2 (lane % 4) and the next of the warp's 16, and 8 further.
      const float4 sum = sum_of_parts(sums, turn);
      const FourValues iq({transposed_matrix(pack_bf16(sum.x, sum.y)), transposed_matrix(pack_bf16(sum.z, sum.w))});
      const float largest = largest_of_lanes<4>(iq.largest());
      if (lane_ % 4 == 0) maxima[warp_] = largest;
      __syncthreads();
      const float4 low = reinterpret_cast<const float4*>(maxima)[0], high = reinterpret_cast<const float4*>(maxima)[1];
      const HeadScale scale(
          fmaxf(fmaxf(fmaxf(low.x, low.y), fmaxf(low.z, low.w)), fmaxf(fmaxf(high.x, high.y), fmaxf(high.z, high.w))));
      const uint32_t codes = scale.codes(iq);
      const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, lane_ % 2 ? codes : codes >> 16, 1);
      if (!finishes(turn)) continue;
      *reinterpret_cast<uint32_t*>(to) = permute_bytes(codes, other, lane_ % 2 ? 0x3254 : 0x5410);  // values in order
      if (warp_ == turn && writes_weight()) a_.output.write_weight(first_ + token(turn), head_, wv_, scale);
    }
  }

 private:
  /// The eight of which CTA `to` finishes tokens at a turn.
  static __device__ __forceinline__ int eight_of(int turn, int to) {
    return Shape::kWholeEights ? turn * kParts + to : turn;
  }
  /// Whether CTA `to` finishes live tokens at a turn.
  __device__ __forceinline__ bool has_live(int turn, int to) const {
    return eight_of(turn, to) * kEight + (Shape::kWholeEights ? 0 : 2 * to) < live_;
  }
  /// Of every four eights puts that of CTA `rank ^ i` at place i, so that registers have constant numbers.
  __device__ __forceinline__ void arrange(float (&sums)[Tokens / 2]) const {
#pragma unroll
    for (int bit = 1; bit < kParts; bit *= 2) {
      const bool swap = place_.rank & bit;
#pragma unroll
      for (int i = 0; i < Tokens / 2; ++i) {
        const int other = i ^ 4 * bit;
        if (other < i) continue;
        const float low = sums[i], high = sums[other];
        sums[i] = swap ? high : low;
        sums[other] = swap ? low : high;
      }
    }
  }
  /// This lane's sums of a turn at place i: rows lane / 4 and 8 on of the warp's 16, tokens 2 (lane % 4) and the next.
  static __device__ __forceinline__ float4 fragment_of(const float (&sums)[Tokens / 2], int turn, int i) {
    const float* d = sums + 4 * (Shape::kWholeEights ? turn * kParts + i : turn);
    return {d[0], d[1], d[2], d[3]};
  }

  /// To the CTA `rank ^ i`.
  __device__ __forceinline__ void send_to(const float (&sums)[Tokens / 2], int i) const {
    const int to = int(place_.rank) ^ i;
    const uint32_t there = address_in(place_.base + inbox_ + uint32_t((i - 1) * Shape::kMessageBytes), uint32_t(to));
    const uint32_t full = address_in(place_.inbox_full().address, uint32_t(to));
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (!has_live(turn, to)) continue;
      send_to_cluster(there + uint32_t(turn * Shape::kTurnBytes), fragment_of(sums, turn, i), full);
    }
  }

  /// (0 + 1) + (2 + 3), whichever of them is this CTA's own.
  __device__ __forceinline__ float4 sum_of_parts(const float (&sums)[Tokens / 2], int turn) const {
    const auto message = [&](int i) {
      return *reinterpret_cast<const float4*>(place_.shared + inbox_ + (i - 1) * Shape::kMessageBytes +
                                              turn * Shape::kTurnBytes);
    };
    float4 own = fragment_of(sums, 0, 0);
#pragma unroll
    for (int i = 1; i < kTurns; ++i) own = i == turn ? fragment_of(sums, i, 0) : own;
    const float4 neighbour = message(1), third = message(2), fourth = message(3);
    return {(own.x + neighbour.x) + (third.x + fourth.x), (own.y + neighbour.y) + (third.y + fourth.y),
            (own.z + neighbour.z) + (third.z + fourth.z), (own.w + neighbour.w) + (third.w + fourth.w)};
  }

  /// After the transposition: the tile's token of this lane, whether this CTA finishes it, and whether this lane writes
  /// weights, those of turn `warp_`.
  __device__ __forceinline__ int token(int turn) const { return eight_of(turn, int(place_.rank)) * kEight + lane_ / 4; }
  __device__ __forceinline__ bool finishes(int turn) const {
    return token(turn) < live_ && (Shape::kWholeEights || lane_ / 8 == int(place_.rank));
  }
  __device__ __forceinline__ bool writes_weight() const { return warp_ < kTurns && lane_ % 4 == 0; }

  const FrontArguments& a_;
  const Place& place_;
  int lane_, warp_;
  int first_, live_, head_;
  uint32_t inbox_;  ///< where this warp and lane read, and write in other CTAs
  bool receives_;
  BFloat16 wv_{};
};

}  // namespace dsacore::cuda
