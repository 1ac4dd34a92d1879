// What prepare and prepare_cache refuse (spec 10), and what they report.
#include <cstdlib>
#include <fstream>

#include "dsacore/version.h"
#include "layer/context.h"
#include "support/layer.h"

namespace dsacore {
namespace {

Case small_case() {
  CaseOptions options;
  options.heads = 2;
  options.batch = 4;
  options.q = 2;
  options.context = "40,100";
  options.q_lora = 128;
  options.index_heads = 8;
  options.topk = 16;
  return make_case(options);
}

struct OptionRefusal {
  const char* argument;
  void (*spoil)(PrepareOptions&);
};
class PrepareRefuses : public ::testing::TestWithParam<OptionRefusal> {};

TEST_P(PrepareRefuses, NamingTheArgument) {
  const Case c = small_case();
  Context context({.threads = 1});
  PrepareOptions options = test::options_for(c);
  GetParam().spoil(options);
  const Error error = test::error_of([&] { PreparedLayer(context, c.config, c.weights, options); });
  EXPECT_EQ(error.code, ErrorCode::kRefused);
  EXPECT_EQ(error.argument, GetParam().argument) << error.message();
  EXPECT_TRUE(context.reserved().empty()) << "memory was reserved before the refusal";
}

INSTANTIATE_TEST_SUITE_P(
    Spec10, PrepareRefuses,
    ::testing::Values(
        OptionRefusal{"batches", [](PrepareOptions& o) { o.batches.clear(); }},
        OptionRefusal{"queries", [](PrepareOptions& o) { o.queries.clear(); }},
        OptionRefusal{"q", [](PrepareOptions& o) { o.queries = {9}; }},
        OptionRefusal{"q", [](PrepareOptions& o) { o.queries = {0}; }},
        OptionRefusal{"batch", [](PrepareOptions& o) { o.batches[0].rows = 0; }},
        OptionRefusal{"batch", [](PrepareOptions& o) { o.batches[0].rows = 257; }},
        OptionRefusal{"batch", [](PrepareOptions& o) { o.batches.push_back(o.batches[0]); }},
        OptionRefusal{"pitch of batch 4", [](PrepareOptions& o) { o.batches[0].pitch_elems -= 1; }},
        OptionRefusal{"batches, queries", [](PrepareOptions& o) { o.queries = {3}; }},
        OptionRefusal{"max_context", [](PrepareOptions& o) { o.max_context = 0; }},
        OptionRefusal{"max_context", [](PrepareOptions& o) { o.max_context = kMaxContext + 1; }},
        OptionRefusal{"cache_pages", [](PrepareOptions& o) { o.cache_pages = -1; }},
        OptionRefusal{"pitch of batch 4", [](PrepareOptions& o) { o.batches[0].pitch_elems = kMaxPitch + 1; }},
        OptionRefusal{"plan_rows", [](PrepareOptions& o) { o.plan_rows = {0}; }},
        OptionRefusal{"plan_rows",
                      [](PrepareOptions& o) {
                        o.plan_rows = {16, 257};
                      }},
        OptionRefusal{"overlap", [](PrepareOptions& o) { o.overlap = "sideways"; }},
        OptionRefusal{"kernels", [](PrepareOptions& o) { o.kernels = "nothing=x"; }},
        OptionRefusal{"kernel of indexer", [](PrepareOptions& o) { o.kernels = "indexer=missing"; }},
        OptionRefusal{"kernel of indexer", [](PrepareOptions& o) { o.kernels = "indexer=fused|missing"; }},
        OptionRefusal{"kernel of query", [](PrepareOptions& o) { o.kernels = "query=many_rows"; }}));

struct CacheRefusal {
  const char* argument;
  void (*spoil)(KvCache&, IndexCache&);
};
class PrepareCacheRefuses : public ::testing::TestWithParam<CacheRefusal> {};

TEST_P(PrepareCacheRefuses, NamingTheArgument) {
  const Case c = small_case();
  test::CaseCaches caches(c);
  Context context({.threads = 1});
  PrepareOptions options = test::options_for(c);
  options.cache_pages = c.index.pages;
  PreparedLayer layer(context, c.config, c.weights, options);
  GetParam().spoil(caches.kv, caches.index);
  const Error error = test::error_of([&] { layer.prepare_cache(caches.kv, caches.index); });
  EXPECT_EQ(error.code, ErrorCode::kRefused);
  EXPECT_EQ(error.argument, GetParam().argument) << error.message();
}

INSTANTIATE_TEST_SUITE_P(
    Spec10, PrepareCacheRefuses,
    ::testing::Values(
        CacheRefusal{"kv_cache format", [](KvCache& kv, IndexCache&) { kv.format = KvFormat::kFp8; }},
        CacheRefusal{"index_cache format", [](KvCache&, IndexCache& index) { index.format = IndexFormat::kMxfp4; }},
        CacheRefusal{"kv_cache row", [](KvCache& kv, IndexCache&) { kv.row_bytes = 576; }},
        CacheRefusal{"index_cache row", [](KvCache&, IndexCache& index) { index.row_bytes = 68; }},
        CacheRefusal{"kv_cache", [](KvCache& kv, IndexCache&) { kv.data = nullptr; }},
        CacheRefusal{"index_cache", [](KvCache&, IndexCache& index) { index.data = nullptr; }},
        CacheRefusal{"page", [](KvCache& kv, IndexCache&) { kv.page = 96; }},
        CacheRefusal{"page", [](KvCache& kv, IndexCache&) { kv.page = 0; }},
        CacheRefusal{"stride_rows", [](KvCache& kv, IndexCache&) { kv.stride_rows = 63; }},
        CacheRefusal{"kv_cache pages", [](KvCache& kv, IndexCache&) { kv.pages = 0; }},
        CacheRefusal{"kv_cache", [](KvCache& kv, IndexCache&) { kv.pages = (int64_t(1) << 31) / 64 + 1; }},
        CacheRefusal{"index_cache pages", [](KvCache&, IndexCache& index) { index.pages += 1; }}));

TEST(PrepareCache, KeepsTheCachesThatItWasBoundTo) {
  const Case c = small_case();
  test::CaseCaches caches(c);
  test::CaseCaches others(c);
  Context context({.threads = 1});
  PreparedLayer layer(context, c.config, c.weights, test::options_for(c));
  layer.prepare_cache(caches.kv, caches.index);
  layer.prepare_cache(caches.kv, caches.index);
  EXPECT_EQ(test::error_of([&] { layer.prepare_cache(others.kv, others.index); }).argument, "kv_cache, index_cache");
}

TEST(PrepareCache, PhysicalRowsMayReachTheLastInt32) {
  const Case c = small_case();
  test::CaseCaches caches(c);
  Context context({.threads = 1});
  PreparedLayer layer(context, c.config, c.weights, test::options_for(c));
  caches.kv.pages = (int64_t(1) << 31) / 64;  // bound, never touched
  layer.prepare_cache(caches.kv, caches.index);
}

TEST(Prepare, ReportsItsChoicesAndReservations) {
  const Case c = small_case();
  std::vector<std::string> lines;
  Context context({.threads = 1, .on_choice = [&](std::string_view line) { lines.emplace_back(line); }});
  PrepareOptions options = test::options_for(c);
  options.queries = {1, 2};
  options.batches.push_back({16, c.sizes.width() + 8});
  const PreparedLayer layer(context, c.config, c.weights, options);
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines, layer.choices());
  EXPECT_NE(lines[0].find("B=4 q=1 query="), std::string::npos) << lines[0];
  int64_t total = 0;
  for (const ReservedItem& item : layer.reserved_bytes()) {
    EXPECT_FALSE(item.name.empty());
    EXPECT_GE(item.bytes, 0);
    total += item.bytes;
  }
  EXPECT_GE(total, 16 * 2 * kQueryRow * 2 + 16 * 2 * kLatent * 2);
}

/// A host backend with a device's demand on addresses.
struct AlignedContext {
  AlignedContext() : backend(*context.impl().backend) {
    backend.alignment = 16;
    context.impl().backend = &backend;
  }
  Context context{{.threads = 1}};
  Backend backend;
};

TEST(Prepare, WeightsBeginWhereTheBackendCanReadThem) {
  const Case c = small_case();
  const std::pair<const char*, TensorRef LayerWeights::*> tensors[] = {
      {"q_a_layernorm.weight", &LayerWeights::q_a_layernorm}, {"kv_a_layernorm.weight", &LayerWeights::kv_a_layernorm},
      {"q_b_proj.weight", &LayerWeights::q_b_proj},           {"kv_b_proj.weight", &LayerWeights::kv_b_proj},
      {"indexer.wq_b.weight", &LayerWeights::wq_b},
  };
  for (const auto& [name, tensor] : tensors) {
    AlignedContext aligned;
    LayerWeights weights = c.weights;
    (weights.*tensor).data = static_cast<const std::byte*>((weights.*tensor).data) + 8;
    const Error error =
        test::error_of([&] { PreparedLayer(aligned.context, c.config, weights, test::options_for(c)); });
    EXPECT_EQ(error.code, ErrorCode::kRefused);
    EXPECT_EQ(error.argument, name);
    EXPECT_EQ(error.allowed, "must begin at a multiple of 16 bytes");
    EXPECT_TRUE(aligned.context.reserved().empty());
  }
}

TEST(PrepareCache, CachesBeginWhereTheBackendCanReadThem) {
  const Case c = small_case();
  AlignedContext aligned;
  PreparedLayer layer(aligned.context, c.config, c.weights, test::options_for(c));
  KvCache kv = c.kv;
  IndexCache index = c.index;
  kv.data += 4;
  EXPECT_EQ(test::error_of([&] { layer.prepare_cache(kv, index); }).argument, "kv_cache");
  kv = c.kv;
  index.data += 8;
  EXPECT_EQ(test::error_of([&] { layer.prepare_cache(kv, index); }).argument, "index_cache");
  layer.prepare_cache(kv, c.index);
}

TEST(Prepare, LayersOfEqualKeysShareTheirPlans) {
  const Case c = small_case();
  Context context({.threads = 1});
  PrepareOptions options = test::options_for(c);
  options.batches.push_back({8, c.sizes.width()});
  const PreparedLayer first(context, c.config, c.weights, options);
  EXPECT_EQ(context.plans(), 2) << "a plan each for 4 and for 8 rows";
  const std::vector<ReservedItem> reserved = context.reserved();
  LayerConfig config = c.config;
  config.softmax_scale *= 2;
  config.eps *= 2;
  const PreparedLayer second(context, config, c.weights, options);
  EXPECT_EQ(context.plans(), 2) << "a layer's constants are not the plan's";
  ASSERT_EQ(context.reserved().size(), reserved.size());
  for (size_t i = 0; i < reserved.size(); ++i) EXPECT_EQ(context.reserved()[i].bytes, reserved[i].bytes);
  config.topk = 8;
  const PreparedLayer third(context, config, c.weights, options);
  EXPECT_EQ(context.plans(), 4) << "another topk";
}

TEST(Prepare, BatchesUnderACapacityShareItsPlanAndItsScratch) {
  const Case c = small_case();
  const auto prepare = [&](Context& context, std::vector<int> batches, std::vector<int> capacities) {
    PrepareOptions options = test::options_for(c);
    options.batches.clear();
    for (int rows : batches) options.batches.push_back({rows, c.sizes.width()});
    options.plan_rows = std::move(capacities);
    return PreparedLayer(context, c.config, c.weights, options).choices();
  };
  Context context({.threads = 1});
  const std::vector<std::string> lines = prepare(context, {2, 6, 14, 24, 96}, {64, 15});
  EXPECT_EQ(context.plans(), 3)
      << "2, 6 and 14 rows have that of 14, whole requests of 2 rows; 24 that of 64; 96 its own";
  EXPECT_TRUE(lines[0].ends_with(" plan_rows=14")) << lines[0];
  EXPECT_TRUE(lines[1].ends_with(" plan_rows=14")) << lines[1];
  EXPECT_EQ(lines[2].find("plan_rows"), std::string::npos) << lines[2];
  EXPECT_TRUE(lines[3].ends_with(" plan_rows=64")) << lines[3];
  EXPECT_EQ(lines[4].find("plan_rows"), std::string::npos) << lines[4];

  Context small({.threads = 1}), large({.threads = 1});
  prepare(small, {2}, {14});
  prepare(large, {14}, {});
  ASSERT_EQ(small.reserved().size(), large.reserved().size());
  for (size_t i = 0; i < small.reserved().size(); ++i) {
    EXPECT_EQ(small.reserved()[i].bytes, large.reserved()[i].bytes) << small.reserved()[i].name;
  }
  prepare(small, {4, 12}, {14});
  EXPECT_EQ(small.plans(), 1) << "a later layer with other batches";
}

TEST(Prepare, ABatchWithOtherKernelsKeepsAPlanOfItsOwn) {
  const Case c = small_case();
  Context context({.threads = 1});
  PrepareOptions options = test::options_for(c);
  options.batches = {{8, c.sizes.width()}, {32, c.sizes.width()}};
  options.plan_rows = {64};
  const std::vector<std::string> lines = PreparedLayer(context, c.config, c.weights, options).choices();
  EXPECT_EQ(lines[0].find("plan_rows"), std::string::npos) << lines[0];
  EXPECT_NE(lines[1].find("plan_rows=64"), std::string::npos) << lines[1];
  options.batches.resize(1);
  options.kernels = "query=few_rows";
  EXPECT_EQ(PreparedLayer(context, c.config, c.weights, options).choices()[0].find("plan_rows"), std::string::npos);
}

TEST(Prepare, AStepHasTheSameBitsUnderACapacity) {
  const Case c = small_case();
  for (BackendKind backend : {BackendKind::kReference, BackendKind::kCpu}) {
    const test::LayerOutput own = test::run_layer(c, {.backend = backend, .threads = 2});
    for (int capacity : {4, 12, 16, 64, 256}) {
      SCOPED_TRACE(capacity);
      test::expect_same_bits(test::run_layer(c, {.backend = backend, .threads = 2}, -1, {capacity}), own);
    }
  }
}

TEST(Prepare, OverlapModesAreAcceptedAndListed) {
  const Case c = small_case();
  Context context({.threads = 1});
  for (const char* mode : {"serial", "wait", "fork", "front", "late", "late_front"}) {
    PrepareOptions options = test::options_for(c);
    options.overlap = mode;
    const PreparedLayer layer(context, c.config, c.weights, options);
    EXPECT_NE(layer.choices()[0].find(std::string("overlap=") + mode), std::string::npos);
  }
}

TEST(Context, RefusesWhatItCannotRun) {
  if (backends() == "reference cpu") {
    EXPECT_EQ(test::error_of([] { Context({.backend = BackendKind::kCuda}); }).argument, "backend");
  }
  EXPECT_EQ(test::error_of([] { Context({.cpu_target = "pdp11"}); }).argument, "cpu_target");
  EXPECT_EQ(test::error_of([] { Context({.threads = -1}); }).argument, "threads");
  EXPECT_EQ(test::error_of([] { Context({.threads = 5000}); }).argument, "threads");
  EXPECT_EQ(test::error_of([] { Context({.threads = 1, .tables_file = "/nonexistent/tables.json"}); }).argument,
            "tables");
}

/// Sets an environment variable for the length of a test.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Environment() { unsetenv(name_); }

 private:
  const char* name_;
};

TEST(Context, ReadsItsEnvironment) {
  {
    Environment threads("DSACORE_THREADS", "3");
    EXPECT_EQ(Context(ContextOptions()).threads(), 3);
    EXPECT_EQ(Context({.threads = 2}).threads(), 2);
  }
  {
    Environment threads("DSACORE_THREADS", "3 of them");
    EXPECT_EQ(test::error_of([] { Context context{ContextOptions()}; }).argument, "DSACORE_THREADS");
  }
  {
    Environment target("DSACORE_CPU_TARGET", "pdp11");
    EXPECT_EQ(test::error_of([] { Context context{ContextOptions()}; }).argument, "DSACORE_CPU_TARGET");
    EXPECT_EQ(Context({.backend = BackendKind::kReference}).cpu_target(), "scalar");
  }
  {
    Environment tables("DSACORE_TABLES", "/nonexistent/tables.json");
    EXPECT_EQ(test::error_of([] { Context context{ContextOptions()}; }).argument, "tables");
  }
}

}  // namespace
}  // namespace dsacore
