// Host side of the score kernel: which instance, how many stages, on how many SMs.
#include <algorithm>

#include "backends/cuda/indexer_stages.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/scores.h"
#include "format/layouts.h"
#include "format/paging.h"

namespace dsacore::cuda {
namespace {

constexpr int kEnoughStages = 6;
constexpr int kPagesOfShort = 4;  ///< of a CTA

struct Choice {
  ScoresInstance instance;
  int stages, shared_bytes;
};

Choice choose(IndexFormat format, int heads, int q, bool is_short) {
  const int tile_heads = score_passes(heads) * score_width(heads);
  const int page_bytes = kIndexPage * row_bytes(format);
  const int rest = ScoresShared(q, tile_heads).pages;
  const ScoresInstance instance =
      format == IndexFormat::kFp8 ? scores_fp8(heads, q, is_short) : scores_mxfp4(heads, q, is_short);
  const auto stages_in = [&](int bytes) {
    return std::clamp((bytes - rest) / page_bytes, 0, ScoresShared::kMaxStages) / instance.groups * instance.groups;
  };
  int stages = stages_in(kHalfOfShared);
  if (stages < kEnoughStages) stages = std::min(8 / instance.groups * instance.groups, stages_in(kWholeOfShared));
  return {instance, stages, rest + stages * page_bytes};
}

/// Of pieces with up to `piece_bytes` of keys, where a unit has `unit_bytes`, but more if they would be too many.
int piece_bits_of(int64_t units, int64_t piece_bytes, int64_t unit_bytes) {
  int bits = 0;
  while (unit_bytes << (bits + 1) <= piece_bytes || units > int64_t(ScoresShared::kMaxPieces) << bits) ++bits;
  return bits;
}

unsigned multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return unsigned(count);
}

}  // namespace

void prepare_scores(const ShapeKey& shape) {
  for (const bool is_short : {false, true}) {
    const auto kernel = choose(shape.index_format, shape.sizes.index_heads, shape.q, is_short).instance.kernel;
    // As much as any q may take, so that the order in which shapes are prepared does not matter.
    allow_shared(kernel, kWholeOfShared);
    prefer_shared(kernel);  // the selection, and the query, start beside it
  }
}

void enqueue_scores(const IndexerArgs& args, const IndexerScratch& scratch, bool histogram,
                    const Workspace& workspace) {
  const int heads = args.model->sizes.index_heads;
  const unsigned count = multiprocessors();
  const int64_t requests = args.index_query.extent(0) / args.q;
  const int context = context_of(args, scratch);
  const bool is_short = requests * context <= int64_t(kPagesOfShort) * kIndexPage * count;
  const Choice choice = choose(args.index.format, heads, args.q, is_short);
  const ScoresParameters parameters{
      .seq_lens = args.seq_lens,
      .block_table = args.block_table,
      .index_block_table = args.index_block_table,
      .page = args.page,
      .cache = args.index.data,
      .cache_pages = args.index.pages,
      .query = args.index_query,
      .weights = args.head_weights,
      .requests = int(requests),
      .q = args.q,
      .topk = args.model->config.topk,
      .heads = heads,
      .context = context,
      .keys = scratch.keys,
      .key_pitch = scratch.key_pitch,
      .histograms = histogram ? scratch.histograms : nullptr,
      .scored = histogram && in_pieces(args, scratch) ? scratch.scored : nullptr,
      .piece_bits = piece_bits_of(requests * (kUnitsAhead + pages_of(context, kIndexPage)), scratch.piece_bytes,
                                  int64_t(sizeof(uint32_t)) * kIndexPage * args.q),
      .stages = choice.stages};
  launch(choice.instance.kernel,
         {.grid = count, .block = unsigned(choice.instance.threads), .shared_bytes = size_t(choice.shared_bytes)},
         workspace, parameters);
}

}  // namespace dsacore::cuda
