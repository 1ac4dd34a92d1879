// The kernels of the query stage (steps 1 to 5 of spec 4) and how query.cpp puts them together. Host side.
#pragma once

#include "plan/registry.h"

namespace dsacore::cuda::query {

/// What every kernel of the stage is given: the Args with the model's device pointers.
struct Parameters {
  View<const BFloat16, 2> projected;
  View<const int64_t, 1> slots;
  KvCache kv;
  View<BFloat16, 2> q_c;
  QueryRows query;
  View<const BFloat16, 1> q_norm;
  View<const BFloat16, 1> kv_norm;
  View<const BFloat16, 2> w_qb;
  View<const BFloat16, 3> kv_b;
  int64_t kv_a_at;
  int rows;
  int q_lora;
  int heads;
  bool aligned_rows;  ///< every projected row begins at a multiple of 16 bytes
  bool fp8_query;
  float eps;
  float q_scale_inv;
  float k_scale_inv;
};
Parameters parameters_of(const QueryArgs& args);

/// q_c as the streamed projection multiplies it: for every `tile` rows and 64 values a block of `tile` x 128 bytes that is
/// wgmma's B operand (128-byte swizzle). The values of a row are permuted in blocks of 32, as a weight fragment made of
/// 16-byte loads has them: pair p (0..3) of its chunk c (0..3) of eight values lies at pair 4 p + c.
struct QcImage {
  std::byte* data = nullptr;
  int tile = 0;
};
inline int64_t image_bytes(int rows, int q_lora) { return int64_t(rows + 63) / 64 * 64 * q_lora * 2; }

// query_norm.cu: a warp a row. q_c, its image where there is one, and the MLA cache rows where asked for.
void enqueue_norm(const Parameters& p, const Workspace& workspace, QcImage image, bool insert);

// query_cluster.cu: a cluster of 8 or 4 CTAs a head, whose weights stay in registers.
inline constexpr int kClusterMaxHeads = 30;
inline constexpr int kFusedMaxRows = 16;
bool cluster_takes(const LayerSizes& sizes);
void prepare_cluster(const LayerSizes& sizes);
/// `normalise`: steps 1 to 5 in this one launch (up to kFusedMaxRows aligned rows); else q_c is read.
void enqueue_cluster(const Parameters& p, const Workspace& workspace, bool normalise);

// query_stream.cu: a CTA a head, which streams its weights.
int stream_tile(int rows);  ///< rows of the image's tiles
void prepare_stream();
void enqueue_stream(const Parameters& p, const Workspace& workspace, QcImage image);

}  // namespace dsacore::cuda::query
