// The whole layer, prepared, on every cpu target of this machine, against the reference backend by the bounds of
// spec 9.
#include "plan/registry.h"
#include "support/layer.h"
#include "support/targets.h"

namespace dsacore {
namespace {

CaseOptions base() {
  CaseOptions o;
  o.seed = 3;
  o.heads = 3;
  o.batch = 6;
  o.context = "1-700";
  o.q_lora = 256;
  o.index_heads = 8;
  o.topk = 64;
  return o;
}

struct Shape {
  const char* name;
  CaseOptions options;
};

std::vector<Shape> shapes() {
  std::vector<Shape> list;
  for (KvFormat kv : {KvFormat::kFp8DsMla, KvFormat::kFp8, KvFormat::kNvfp4DsMla}) {
    for (IndexFormat index : {IndexFormat::kFp8, IndexFormat::kMxfp4}) {
      CaseOptions o = base();
      o.kv_format = kv;
      o.index_format = index;
      list.push_back({"formats", o});
    }
  }
  CaseOptions o = base();
  o.q = 3;
  o.pad_requests = 1;
  o.page = 128;
  o.stride_rows = 384;
  o.pitch_pad = 24;
  list.push_back({"paged", o});
  o = base();
  o.index_table = true;
  o.slots = SlotsKind::kMixed;
  o.k_norm_bf16 = true;
  o.no_k_bias = true;
  list.push_back({"mixed", o});
  o = base();
  o.topk = 2048;  // every token is selected
  o.heads = 17;
  o.index_heads = 9;
  list.push_back({"dense", o});
  return list;
}

/// Positions of the rows whose selection is the same in both, by row.
std::vector<bool> same_selection(const test::LayerOutput& a, const test::LayerOutput& b, int64_t rows) {
  std::vector<bool> same;
  const size_t topk = a.tokens.size() / size_t(rows);
  for (size_t row = 0; row < size_t(rows); ++row) {
    same.push_back(std::equal(a.tokens.begin() + std::ptrdiff_t(row * topk),
                              a.tokens.begin() + std::ptrdiff_t((row + 1) * topk),
                              b.tokens.begin() + std::ptrdiff_t(row * topk)));
  }
  return same;
}

TEST(Run, AgreesWithTheReferenceOnEveryTarget) {
  for (const Shape& shape : shapes()) {
    const Case c = make_case(shape.options);
    const test::LayerOutput want = test::run_layer(c, {.backend = BackendKind::kReference, .threads = 2});
    for (std::string_view target : test::tested_targets()) {
      SCOPED_TRACE(std::string(shape.name) + " kv=" + std::string(name_of(c.config.kv_format)) +
                   " index=" + std::string(name_of(c.config.index_format)) + " on " + std::string(target));
      const test::LayerOutput got = test::run_layer(c, {.threads = 2, .cpu_target = std::string(target)});
      EXPECT_TRUE(test::same_bits(got.valid, want.valid, "valid"));
      // A selection may differ from the reference's where scores lie within 1e-5; with these seeds a row here and
      // there.
      const std::vector<bool> same = same_selection(got, want, c.step.batch);
      EXPECT_GE(std::count(same.begin(), same.end(), true), c.step.batch - 1);
      const size_t width = want.out.size() / size_t(c.step.batch);
      std::vector<uint16_t> x, y;
      for (size_t row = 0; row < same.size(); ++row) {
        if (!same[row]) continue;
        x.insert(x.end(), got.out.begin() + std::ptrdiff_t(row * width),
                 got.out.begin() + std::ptrdiff_t((row + 1) * width));
        y.insert(y.end(), want.out.begin() + std::ptrdiff_t(row * width),
                 want.out.begin() + std::ptrdiff_t((row + 1) * width));
      }
      EXPECT_LT(test::relative_error(x, y), 8e-3);
    }
  }
}

TEST(Run, TheForcedTargetIsTheOneThatRuns) {
  for (std::string_view target : test::tested_targets()) {
    EXPECT_EQ(Context({.threads = 1, .cpu_target = std::string(target)}).cpu_target(), target);
  }
}

TEST(Run, ManyBatchesFromOneLayer) {
  CaseOptions o = base();
  o.batch = 4;
  const Case c = make_case(o);
  Context context({.threads = 2});
  PrepareOptions options = test::options_for(c);
  options.queries = {1, 2};
  options.batches.push_back({8, c.step.projected.stride(0)});
  test::CaseCaches caches(c);
  PreparedLayer layer(context, c.config, c.weights, options);
  layer.prepare_cache(caches.kv, caches.index);
  const test::LayerOutput want = test::run_layer(c, {.threads = 2});
  for (int batch : {4, 8, 4}) {
    std::vector<uint16_t> out(size_t(batch) * size_t(o.heads) * kValue, 0xFFFF);
    Step step = c.step;
    step.batch = batch;
    step.out = View<BFloat16, 2>(reinterpret_cast<BFloat16*>(out.data()), batch, int64_t(o.heads) * kValue);
    ASSERT_TRUE(layer.run(step).ok());
    std::vector<uint16_t> head(out.begin(), out.begin() + std::ptrdiff_t(want.out.size()));
    EXPECT_TRUE(test::same_bits(head, want.out, "out"));
    EXPECT_EQ(std::count(out.begin() + std::ptrdiff_t(want.out.size()), out.end(), 0),
              std::ptrdiff_t(out.size() - want.out.size()));
  }
}

TEST(Run, NoRequestsGiveZeros) {
  const Case c = make_case(base());
  const test::LayerOutput got = test::run_layer(c, {.threads = 2}, 0);
  EXPECT_EQ(std::count(got.out.begin(), got.out.end(), 0), std::ptrdiff_t(got.out.size()));
  EXPECT_EQ(std::count(got.valid.begin(), got.valid.end(), 0), std::ptrdiff_t(got.valid.size()));
  EXPECT_EQ(std::count(got.tokens.begin(), got.tokens.end(), -1), std::ptrdiff_t(got.tokens.size()));
  EXPECT_TRUE(test::same_bits(got.kv, test::CaseCaches(c).kv_bytes, "kv_cache"));
}

TEST(Run, ANanHarmsItsOwnRowAlone) {
  CaseOptions o = base();
  o.seed = 9;
  o.context = "300";
  const Case clean = make_case(o);
  for (BackendKind backend : {BackendKind::kReference, BackendKind::kCpu}) {
    const test::LayerOutput want = test::run_layer(clean, {.backend = backend, .threads = 2});
    for (int64_t column : {int64_t(3), clean.sizes.kv_a_at() + 5, clean.sizes.kv_a_at() + 520,
                           clean.sizes.gate_at() + 7, clean.sizes.wk_at() + 9, clean.sizes.wv_at() + 1}) {
      for (uint16_t poison : {uint16_t(0x7FC0), uint16_t(0x7F80), uint16_t(0xFF80)}) {
        const Case c = make_case(o);
        const auto bits = reinterpret_cast<const uint16_t*>(c.step.projected.row(2));
        const_cast<uint16_t*>(bits)[column] = poison;
        const test::LayerOutput got = test::run_layer(c, {.backend = backend, .threads = 2});
        const size_t width = want.out.size() / size_t(o.batch);
        for (size_t i = 0; i < want.out.size(); ++i) {
          if (i / width == 2) continue;
          ASSERT_EQ(got.out[i], want.out[i]) << "row " << i / width << " after a NaN in column " << column;
        }
      }
    }
  }
}

TEST(Run, RecordsTheTimesOfItsStages) {
  const Case c = make_case(base());
  Context context({.threads = 1});
  test::CaseCaches caches(c);
  PreparedLayer layer(context, c.config, c.weights, test::options_for(c));
  layer.prepare_cache(caches.kv, caches.index);
  std::vector<uint16_t> out(size_t(c.step.batch) * size_t(c.sizes.heads) * kValue);
  Step step = c.step;
  step.out = View<BFloat16, 2>(reinterpret_cast<BFloat16*>(out.data()), c.step.batch, int64_t(c.sizes.heads) * kValue);
  std::vector<StageTime> times;
  times.reserve(16);
  layer.record_times(&times);
  ASSERT_TRUE(layer.run(step).ok());
  ASSERT_EQ(times.size(), 5u);
  EXPECT_STREQ(times[0].stage, "query");
  EXPECT_STREQ(times[4].stage, "value");
  for (size_t i = 1; i < times.size(); ++i) {
    EXPECT_GE(times[i].begin, times[i - 1].begin + std::chrono::duration<double>(times[i - 1].seconds)) << i;
  }
  layer.record_times(nullptr);
  ASSERT_TRUE(layer.run(step).ok());
  EXPECT_EQ(times.size(), 5u);
}

}  // namespace
}  // namespace dsacore
