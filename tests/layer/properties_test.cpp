// What must not change a bit of the answer (on every backend): where pages lie, how many threads run, how many requests
// are padded. On the reference also: q rows at once or one by one, and a selection of everything against dense
// attention.
#include <numeric>
#include <random>

#include "plan/registry.h"
#include "support/layer.h"
#include "support/stages.h"
#include "support/targets.h"

namespace dsacore {
namespace {

CaseOptions base(KvFormat kv = KvFormat::kFp8DsMla, IndexFormat index = IndexFormat::kFp8) {
  CaseOptions o;
  o.seed = 21;
  o.heads = 3;
  o.batch = 8;
  o.q = 2;
  o.context = "1-900";
  o.q_lora = 256;
  o.index_heads = 16;
  o.topk = 128;
  o.kv_format = kv;
  o.index_format = index;
  return o;
}

std::vector<ContextOptions> all_contexts() {
  std::vector<ContextOptions> list = {{.backend = BackendKind::kReference, .threads = 2}};
  for (std::string_view target : test::tested_targets())
    list.push_back({.threads = 2, .cpu_target = std::string(target)});
  return list;
}

std::vector<CaseOptions> all_formats() {
  return {base(), base(KvFormat::kFp8, IndexFormat::kMxfp4), base(KvFormat::kNvfp4DsMla, IndexFormat::kFp8)};
}

TEST(Properties, ThreadCountChangesNothing) {
  for (const CaseOptions& o : all_formats()) {
    const Case c = make_case(o);
    for (ContextOptions context : all_contexts()) {
      context.threads = 1;
      const test::LayerOutput want = test::run_layer(c, context);
      for (int threads : {2, 3, 7}) {
        SCOPED_TRACE(context.cpu_target + " with " + std::to_string(threads) + " threads");
        context.threads = threads;
        test::expect_same_bits(test::run_layer(c, context), want);
      }
    }
  }
}

TEST(Properties, PaddedRequestsChangeNothing) {
  for (const CaseOptions& o : all_formats()) {
    const Case c = make_case(o);
    const int64_t given = 2;
    const int64_t rows = given * c.step.q;
    for (const ContextOptions& context : all_contexts()) {
      SCOPED_TRACE(context.cpu_target);
      const test::LayerOutput whole = test::run_layer(c, context);
      const test::LayerOutput part = test::run_layer(c, context, given);
      const size_t live = whole.out.size() / size_t(c.step.batch) * size_t(rows);
      const std::vector<uint16_t> a(whole.out.begin(), whole.out.begin() + std::ptrdiff_t(live));
      const std::vector<uint16_t> b(part.out.begin(), part.out.begin() + std::ptrdiff_t(live));
      EXPECT_TRUE(test::same_bits(b, a, "out of the rows given"));
      EXPECT_EQ(std::count(part.out.begin() + std::ptrdiff_t(live), part.out.end(), 0),
                std::ptrdiff_t(part.out.size() - live));
    }
  }
}

/// The same case with its pages in another order.
Case permuted(const CaseOptions& options) {
  Case c = make_case(options);
  std::vector<int32_t> where(static_cast<size_t>(c.kv.pages));
  std::iota(where.begin(), where.end(), 0);
  std::shuffle(where.begin(), where.end(), std::mt19937(5));
  const auto move_pages = [&](std::byte* data, size_t page_bytes) {
    const std::vector<std::byte> old(data, data + page_bytes * where.size());
    for (size_t p = 0; p < where.size(); ++p)
      std::memcpy(data + size_t(where[p]) * page_bytes, &old[p * page_bytes], page_bytes);
  };
  move_pages(c.kv.data, size_t(c.kv.page) * size_t(c.kv.row_bytes));
  move_pages(c.index.data, size_t(c.kv.page) * size_t(c.index.row_bytes));
  const auto table = const_cast<int32_t*>(c.step.block_table.data());
  for (int64_t i = 0; i < c.step.block_table.size(); ++i) table[i] = where[size_t(table[i])];
  const auto move_slots = [&](View<const int64_t, 1> slots, int64_t page) {
    for (int64_t b = 0; b < slots.extent(0); ++b) {
      int64_t& slot = const_cast<int64_t*>(slots.data())[b];
      if (slot >= 0) slot = where[size_t(slot / page)] * page + slot % page;
    }
  };
  move_slots(c.step.slots, c.kv.page);
  move_slots(c.step.index_slots, c.kv.page);
  return c;
}

TEST(Properties, PageOrderChangesNothing) {
  for (CaseOptions o : all_formats()) {
    for (int page : {64, 192}) {
      o.page = page;
      const Case plain = make_case(o);
      const Case moved = permuted(o);
      for (const ContextOptions& context : all_contexts()) {
        SCOPED_TRACE(context.cpu_target + " page " + std::to_string(page));
        const test::LayerOutput a = test::run_layer(plain, context);
        const test::LayerOutput b = test::run_layer(moved, context);
        EXPECT_TRUE(test::same_bits(b.tokens, a.tokens, "topk_tokens"));
        EXPECT_TRUE(test::same_bits(b.valid, a.valid, "valid"));
        EXPECT_TRUE(test::same_bits(b.latent, a.latent, "latent"));
        EXPECT_TRUE(test::same_bits(b.lse, a.lse, "lse"));
        EXPECT_TRUE(test::same_bits(b.out, a.out, "out"));
        EXPECT_FALSE(a.rows == b.rows) << "the pages were not moved";
      }
    }
  }
}

/// Runs the rows of a step with q > 1 one by one, as plain decode steps over the same caches.
std::vector<uint16_t> row_by_row(const Case& c, const ContextOptions& context_options) {
  Context context(context_options);
  test::CaseCaches caches(c);
  const int q = c.step.q;
  const int64_t requests = c.step.seq_lens.extent(0);
  PrepareOptions options = test::options_for(c);
  options.queries = {1};
  options.batches = {{int(requests), c.step.projected.stride(0) * q}};
  PreparedLayer layer(context, c.config, c.weights, options);
  layer.prepare_cache(caches.kv, caches.index);
  const int64_t width = int64_t(c.sizes.heads) * kValue;
  std::vector<uint16_t> all(size_t(c.step.batch * width), 0xFFFF);
  for (int j = 0; j < q; ++j) {
    std::vector<int64_t> slots, index_slots;
    std::vector<int32_t> seq_lens;
    for (int64_t r = 0; r < requests; ++r) {
      slots.push_back(c.step.slots(r * q + j));
      index_slots.push_back(c.step.index_slots(r * q + j));
      seq_lens.push_back(int32_t(keys_seen(c.step.seq_lens(r), q, j)));
    }
    std::vector<uint16_t> out(size_t(requests * width), 0xFFFF);
    Step step = c.step;
    step.batch = int(requests);
    step.q = 1;
    step.projected = View<const BFloat16, 2>(c.step.projected.row(j), requests, c.step.projected.extent(1))
                         .with_pitch(c.step.projected.stride(0) * q);
    step.slots = View<const int64_t, 1>(slots.data(), requests);
    step.index_slots = View<const int64_t, 1>(index_slots.data(), requests);
    step.seq_lens = View<const int32_t, 1>(seq_lens.data(), requests);
    step.out = View<BFloat16, 2>(reinterpret_cast<BFloat16*>(out.data()), requests, width);
    const Status status = layer.run(step);
    if (!status.ok()) ADD_FAILURE() << status.error().message();
    for (int64_t r = 0; r < requests; ++r) {
      std::copy_n(out.begin() + r * width, width, all.begin() + (r * q + j) * width);
    }
  }
  return all;
}

TEST(Properties, RowsAtOnceOrOneByOne) {
  for (CaseOptions o : all_formats()) {
    o.q = 4;
    o.context = "2,300,77,900";
    o.batch = 16;
    const Case c = make_case(o);
    const ContextOptions reference = {.backend = BackendKind::kReference, .threads = 2};
    EXPECT_TRUE(test::same_bits(row_by_row(c, reference), test::run_layer(c, reference).out, "out on reference"));
    for (std::string_view target : test::tested_targets()) {
      const ContextOptions context = {.threads = 2, .cpu_target = std::string(target)};
      EXPECT_LT(test::relative_error(row_by_row(c, context), test::run_layer(c, context).out), 8e-3) << target;
    }
  }
}

TEST(Properties, SelectingEverythingIsDenseAttention) {
  for (CaseOptions o : all_formats()) {
    o.topk = 1024;
    const Case c = make_case(o);
    for (const ContextOptions& context_options : all_contexts()) {
      SCOPED_TRACE(context_options.cpu_target);
      const Backend& backend = context_options.backend == BackendKind::kReference
                                   ? reference_backend()
                                   : *cpu_backend(context_options.cpu_target);
      test::StageRunner runner(c, backend);
      runner.run(backend.query, runner.query_args());
      // Dense: every key that the row sees, without asking the indexer.
      for (int64_t b = 0; b < runner.rows; ++b) {
        const int64_t n = keys_seen(c.step.seq_lens(b / c.step.q), c.step.q, int(b % c.step.q));
        runner.valid(b) = int32_t(n);
        for (int64_t t = 0; t < o.topk; ++t) {
          const Place place =
              kv_place(c.step.block_table.row(b / c.step.q), c.kv.page, LocalId(int32_t(t < n ? t : 0)));
          runner.topk_rows(b, t) = t < n ? physical_row(place, c.kv.stride_rows).value() : -1;
        }
      }
      runner.run(backend.sparse_core, runner.sparse_core_args());
      runner.run(backend.value, runner.value_args());
      const test::LayerOutput layer = test::run_layer(c, context_options);
      const std::vector<uint16_t> dense(reinterpret_cast<uint16_t*>(runner.out.data()),
                                        reinterpret_cast<uint16_t*>(runner.out.data()) + runner.out.size());
      EXPECT_TRUE(test::same_bits(layer.out, dense, "out"));
    }
  }
}

}  // namespace
}  // namespace dsacore
