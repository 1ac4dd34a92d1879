// indexer of the cpu backend: steps 9 and 10 of spec.md, and at D > 1 the local part of step 2 of spec 7.
//
// index cache, index query, head weights -> score keys (scores-inl.h) -> best tokens (select-inl.h) -> tokens, physical
// rows | candidates
//
// Two parallel regions for a wave of requests, as many as their keys find room in scratch (indexer_layout.h): scores
// over runs of pages, selection over rows. A step of one short wave, as most are, has no third.
#include <algorithm>
#include <array>
#include <climits>
#include <numeric>
#include <type_traits>

#include "backends/cpu/bf16_ops.h"
#include "backends/cpu/indexer_layout.h"
#include "backends/cpu/kernels.h"
#include "stages/stages.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/indexer.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "backends/cpu/scores-inl.h"
#include "backends/cpu/select-inl.h"
#include "hwy/highway.h"
#if HWY_TARGET == HWY_AVX3
#include "backends/cpu/scores_amx-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace dsacore::cpu {
namespace HWY_NAMESPACE {
namespace {

using Score = void (*)(const ScoreTask& task);

/// How units are scored, and how the queries are to lie for it.
struct Method {
  Score score;
  QueryPanels panels;
};

#if HWY_TARGET == HWY_AVX3
template <class Unit>
Score amx_score(int columns) {
  return columns == kTileColumns ? score_units_amx<Unit, 2> : score_units_amx<Unit, 4>;
}
Method amx_method(IndexFormat format, int heads, int q) {
  const QueryPanels panels = tile_panels(heads, q);
  if (format == IndexFormat::kMxfp4) return {amx_score<Mxfp4Unit>(panels.columns), panels};
  if (__builtin_cpu_supports("gfni")) return {amx_score<Fp8Unit<ByGfni>>(panels.columns), panels};
  return {amx_score<Fp8Unit<ByTable>>(panels.columns), panels};
}
#endif

Method method_for(const IndexerArgs& args, const Bf16Ops& ops) {
  const int heads = args.model->sizes.index_heads;
#if HWY_TARGET == HWY_AVX3
  if (&ops == amx_ops()) return amx_method(args.index.format, heads, args.q);
#endif
  static_cast<void>(ops);
  const Score score = args.index.format == IndexFormat::kFp8 ? score_units<Fp8Unit<ByTable>> : score_units<Mxfp4Unit>;
  return {score, block_panels(heads, args.q)};
}

/// What all tasks of a run share.
struct IndexerRun {
  const IndexerArgs& args;
  const Bf16Ops& ops;
  Method method;
  IndexerScratch scratch;
  int topk;
  Threads& threads;

  /// n of a row (spec 5), and what this rank holds of it.
  int64_t seen(int64_t request, int position) const { return keys_seen(args.seq_lens(request), args.q, position); }
  int64_t held(int64_t request, int position) const { return local_count(args.shard, seen(request, position)); }
  /// Tokens of a request that are to be scored.
  int64_t scored(int64_t request) const {
    const int last = args.q - 1;
    return seen(request, last) > topk ? held(request, last) : 0;
  }
};

/// Requests that are worked on together.
struct Wave {
  const RequestKeys* requests;
  int64_t count;
  int64_t task_pages;

  int64_t tasks() const { return requests[count - 1].task_end; }
};

/// The requests from `first` on whose keys fit into `bytes`; at least one, for which scratch_bytes made room.
Wave plan_wave(const IndexerRun& run, int64_t first, std::byte* keys, int64_t bytes) {
  const int64_t requests = run.args.seq_lens.extent(0);
  RequestKeys* wave = run.scratch.requests;
  int64_t used = 0, pages = 0, count = 0;
  for (; first + count < requests; ++count) {
    const int64_t tokens = run.scored(first + count);
    const int64_t need = key_bytes(run.args.q, tokens);
    if (count > 0 && used + need > bytes) break;
    const int64_t pitch = key_pitch(tokens);
    uint32_t* at = reinterpret_cast<uint32_t*>(keys + used);
    wave[count] = {first + count, tokens, pitch, 0, at, at + run.args.q * pitch};
    used += need;
    pages += pages_of(tokens, kIndexPage);
  }
  int64_t tasks = 0;
  for (int64_t i = 0; i < count; ++i) {
    tasks += (pages_of(wave[i].tokens, kIndexPage) + task_pages(pages) - 1) / task_pages(pages);
    wave[i].task_end = tasks;
  }
  return {wave, count, task_pages(pages)};
}

/// Scores the pages of one task of a wave.
void score_task(const IndexerRun& run, const Wave& wave, int64_t task, int worker) {
  const RequestKeys* request = std::upper_bound(wave.requests, wave.requests + wave.count, task,
                                                [](int64_t t, const RequestKeys& keys) { return t < keys.task_end; });
  const int64_t task_begin = request == wave.requests ? 0 : request[-1].task_end;
  const int64_t first = (task - task_begin) * wave.task_pages;
  const int64_t last = std::min(first + wave.task_pages, pages_of(request->tokens, kIndexPage));
  std::array<int64_t, kMaxQ> held;
  for (int j = 0; j < run.args.q; ++j) held[size_t(j)] = run.held(request->request, j);
  const ScoreBuffers buffers = run.scratch.score_buffers(worker);
  const ScoreTask score{
      run.args, run.ops, run.method.panels, *request, held.data(), first * kUnitsOfPage, last * kUnitsOfPage, buffers};
  if (*buffers.request != request->request) {
    pack_queries(score, run.args.index.format == IndexFormat::kFp8 ? kFp8Order : kMxfp4Order);
    *buffers.request = request->request;
  }
  run.method.score(score);
  constexpr int kGroups = kIndexPage / kKeyGroup;
  for (int j = 0; j < run.args.q; ++j) {
    group_maxima(request->keys_of(j) + first * kIndexPage, (last - first) * kGroups,
                 request->maxima_of(j) + first * kGroups);
  }
}

/// Physical rows of tokens. A page size that the compiler knows spares a division for each.
template <class Page>
void write_rows(const IndexerRun& run, int64_t row, int64_t valid, Page page) {
  const int32_t* table = run.args.block_table.row(row / run.args.q);
  const int32_t* tokens = run.args.topk_tokens.row(row);
  int32_t* rows = run.args.topk_rows.row(row);
  for (int64_t i = 0; i < valid; ++i) {
    rows[i] = physical_row(kv_place(table, page, LocalId(tokens[i])), run.args.stride_rows).value();
  }
  std::fill(rows + valid, rows + run.topk, -1);
}

/// Tokens that are in place, at D = 1 by their local ids, get -1 after them, and their physical rows.
void complete_row(const IndexerRun& run, int64_t row, int64_t valid) {
  int32_t* tokens = run.args.topk_tokens.row(row);
  std::fill(tokens + valid, tokens + run.topk, -1);
  run.args.valid(row) = int32_t(valid);
  if (run.args.page == kIndexPage) return write_rows(run, row, valid, std::integral_constant<int, kIndexPage>());
  write_rows(run, row, valid, run.args.page);
}

template <class CandidateAt>
void write_candidates(const IndexerRun& run, int64_t row, int64_t count, CandidateAt candidate_at) {
  Candidate* out = run.args.candidates.row(row);
  for (int64_t i = 0; i < count; ++i) out[i] = candidate_at(i);
  std::fill(out + count, out + run.topk, Candidate{0, INT32_MAX});
}

constexpr int kTogether = -1;

/// Selects for row `position` of a request: by one worker, or, for kTogether, by all threads.
void select_row(const IndexerRun& run, const RequestKeys& request, int position, int worker) {
  const int64_t row = request.request * run.args.q + position;
  const int64_t n = run.seen(request.request, position), held = run.held(request.request, position);
  const bool alone = run.args.shard.ranks == 1;
  if (n <= run.topk) {
    if (alone) {
      std::iota(run.args.topk_tokens.row(row), run.args.topk_tokens.row(row) + n, 0);
      return complete_row(run, row, n);
    }
    return write_candidates(run, row, 0, [](int64_t) { return Candidate{}; });
  }
  const uint32_t* keys = request.keys_of(position);
  const auto global = [&](int64_t local) { return global_of(run.args.shard, LocalId(int32_t(local))).value(); };
  if (held <= run.topk) {
    return write_candidates(run, row, held, [&](int64_t i) { return Candidate{keys[i], global(i)}; });
  }
  const uint32_t* maxima = request.maxima_of(position);
  const TokenList best = worker == kTogether
                             ? select_best_together(keys, maxima, held, run.topk, run.scratch.together, run.threads)
                             : select_best(keys, maxima, held, run.topk, run.scratch.select_buffers(worker));
  if (alone) {
    std::copy_n(best.tokens, best.count, run.args.topk_tokens.row(row));
    return complete_row(run, row, best.count);
  }
  write_candidates(run, row, best.count, [&](int64_t i) { return Candidate{best.keys[i], global(best.tokens[i])}; });
}

void select_rows(const IndexerRun& run, const Wave& wave) {
  const int64_t rows = wave.count * run.args.q;
  const auto select = [&](int64_t task, int worker) {
    select_row(run, wave.requests[task / run.args.q], int(task % run.args.q), worker);
  };
  // Each row waits for the one before where all threads share one: only for few rows that are long enough to be shared.
  int64_t longest = 0;
  for (int64_t i = 0; i < wave.count; ++i) longest = std::max(longest, wave.requests[i].tokens);
  if (2 * rows > run.threads.count() || groups_of(longest) < run.topk) return run.threads.for_each(rows, select);
  for (int64_t row = 0; row < rows; ++row) select(row, kTogether);
}

void run_waves(const IndexerRun& run, std::byte* keys, int64_t bytes) {
  const int64_t requests = run.args.seq_lens.extent(0);
  for (int64_t first = 0; first < requests;) {
    const Wave wave = plan_wave(run, first, keys, bytes);
    for (int w = 0; w < run.threads.count(); ++w) *run.scratch.score_buffers(w).request = -1;
    run.threads.for_each(wave.tasks(), [&](int64_t task, int worker) { score_task(run, wave, task, worker); });
    select_rows(run, wave);
    first += wave.count;
  }
}

void run_indexer(const IndexerArgs& args, const Workspace& workspace) {
  Threads& threads = *workspace.threads;
  const Bf16Ops& ops = ops_of(workspace);
  const Method method = method_for(args, ops);
  const int topk = args.model->config.topk;
  const int64_t requests = args.seq_lens.extent(0);
  int64_t longest = 0;
  for (int64_t r = 0; r < requests; ++r) {
    longest = std::max(longest, local_count(args.shard, keys_seen(args.seq_lens(r), args.q, args.q - 1)));
  }
  std::byte* base = workspace.scratch.data();
  const IndexerScratch scratch(base, method.panels, topk, longest, requests);
  const IndexerRun run{args, ops, method, scratch, topk, threads};
  const int64_t keys_at = scratch.keys_at(threads.count());
  threads.together([&] { run_waves(run, base + keys_at, int64_t(workspace.scratch.size()) - keys_at); });
}

Verdict accepts(const ShapeKey&) { return {}; }

int64_t scratch_bytes(const ShapeKey& shape, int threads) {
  const QueryPanels panels = tile_panels(shape.sizes.index_heads, shape.q);  // the largest
  const int64_t requests = shape.rows / shape.q;
  const int64_t one = key_bytes(shape.q, shape.max_context);
  return IndexerScratch(nullptr, panels, shape.topk, shape.max_context, requests).keys_at(threads) +
         std::max(one, std::min(one * requests, key_bytes(1, kWaveKeys)));
}

constexpr Kernel<IndexerArgs> kKernels[] = {{"fused", accepts, scratch_bytes, run_indexer}};

}  // namespace

std::span<const Kernel<IndexerArgs>> IndexerKernels() { return kKernels; }

}  // namespace HWY_NAMESPACE
}  // namespace dsacore::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dsacore::cpu {

HWY_EXPORT(IndexerKernels);
std::span<const Kernel<IndexerArgs>> indexer_kernels() { return HWY_DYNAMIC_DISPATCH(IndexerKernels)(); }

}  // namespace dsacore::cpu
#endif
