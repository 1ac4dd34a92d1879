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

enum class Form { kShort, kLong, kInPieces };

Choice choose(IndexFormat format, int heads, int q, Form form) {
  const int tile_heads = score_passes(heads) * score_width(heads);
  const int page_bytes = kIndexPage * row_bytes(format);
  const int rest = ScoresShared(q, tile_heads, form == Form::kInPieces).pages;
  const bool is_short = form == Form::kShort;
  const ScoresInstance instance = form == Form::kInPieces       ? scores_fp8_in_pieces(heads)
                                  : format == IndexFormat::kFp8 ? scores_fp8(heads, q, is_short)
                                                                : scores_mxfp4(heads, q, is_short);
  const auto stages_in = [&](int bytes) {
    return std::clamp((bytes - rest) / page_bytes, 0, ScoresShared::kMaxStages) / instance.groups * instance.groups;
  };
  int stages = stages_in(kHalfOfShared);
  if (stages < kEnoughStages) stages = std::min(8 / instance.groups * instance.groups, stages_in(kWholeOfShared));
  return {instance, stages, rest + stages * page_bytes};
}

/// Of pieces with up to `piece_bytes` of keys of one row a request, but more if they would be too many.
int piece_bits_of(int64_t units, int64_t piece_bytes) {
  constexpr int64_t kUnitBytes = kIndexPage * int64_t(sizeof(uint32_t));
  int bits = 0;
  while (kUnitBytes << (bits + 1) <= piece_bytes || units > int64_t(kMaxPieces) << bits) ++bits;
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
  for (const Form form : {Form::kShort, Form::kLong, Form::kInPieces}) {
    if (form == Form::kInPieces && !has_pieces(shape.index_format, shape.sizes.index_heads, shape.q)) continue;
    const auto kernel = choose(shape.index_format, shape.sizes.index_heads, shape.q, form).instance.kernel;
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
  const bool pieces = histogram && in_pieces(args, scratch);
  const Choice choice = choose(args.index.format, heads, args.q,
                               pieces     ? Form::kInPieces
                               : is_short ? Form::kShort
                                          : Form::kLong);
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
      .stages = choice.stages,
      .scored = pieces ? scratch.scored : nullptr,
      .piece_bits =
          pieces ? piece_bits_of(requests * (kUnitsAhead + pages_of(context, kIndexPage)), scratch.piece_bytes) : 0};
  launch(choice.instance.kernel,
         {.grid = count, .block = unsigned(choice.instance.threads), .shared_bytes = size_t(choice.shared_bytes)},
         workspace, parameters);
}

}  // namespace dsacore::cuda
