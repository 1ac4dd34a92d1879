// The cpu backend's query stage (steps 1 to 5) against the reference backend within spec 9, and against plain formulas
// where the weights make every sum exact; its bits over threads, live rows and broken neighbours. On every target that
// the machine runs.
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "cpu/agreement.h"
#include "cpu/plain_layer.h"
#include "support/targets.h"

namespace dsacore::test {
namespace {

struct Shape {
  int heads, q_lora, rows, q;
  KvFormat format;
  int threads = 2;
};

CaseOptions options_of(const Shape& s) {
  CaseOptions o;
  o.seed = uint64_t(s.heads * 1000 + s.rows);
  o.heads = s.heads;
  o.q_lora = s.q_lora;
  o.batch = s.rows;
  o.q = s.q;
  o.kv_format = s.format;
  o.context = "1-300";
  o.index_heads = 8;
  o.pitch_pad = 5;
  o.slots = SlotsKind::kMixed;
  return o;
}

class QueryAgreement : public ::testing::TestWithParam<Shape> {
 protected:
  static void compare(const CaseOptions& options, int threads) {
    const Case c = make_case(options);
    StageRunner want(c, reference_backend());
    want.run(want.backend().query, want.query_args());
    const std::vector<int64_t> rows = judged_rows(c, c.step.batch);
    for (const std::string_view target : tested_targets()) {
      SCOPED_TRACE(target);
      StageRunner got(c, *cpu_backend(target), threads);
      got.run(got.backend().query, got.query_args());
      EXPECT_TRUE(nearly_equal(got.q_c, want.q_c, rows, "q_c"));
      EXPECT_TRUE(query_agrees(got, want, rows));
      EXPECT_TRUE(kv_cache_agrees(got, want, rows));
    }
  }
};

TEST_P(QueryAgreement, Plain) { compare(options_of(GetParam()), GetParam().threads); }

TEST_P(QueryAgreement, Adversarial) {
  CaseOptions options = options_of(GetParam());
  options.adversarial = {"all"};
  if (GetParam().rows / GetParam().q > 4) options.pad_requests = 1;
  compare(options, GetParam().threads);
}

INSTANTIATE_TEST_SUITE_P(
    FewRows, QueryAgreement,
    ::testing::Values(Shape{1, 128, 1, 1, KvFormat::kFp8DsMla}, Shape{6, 1536, 3, 1, KvFormat::kFp8, 4},
                      Shape{12, 2048, 8, 2, KvFormat::kNvfp4DsMla}, Shape{96, 1536, 3, 1, KvFormat::kFp8DsMla},
                      Shape{12, 1536, 16, 1, KvFormat::kFp8DsMla, 5}, Shape{96, 128, 9, 3, KvFormat::kFp8}));
INSTANTIATE_TEST_SUITE_P(ManyRows, QueryAgreement,
                         ::testing::Values(Shape{12, 1536, 17, 1, KvFormat::kFp8DsMla},
                                           Shape{6, 2048, 64, 4, KvFormat::kFp8, 4},
                                           Shape{1, 128, 64, 1, KvFormat::kNvfp4DsMla},
                                           Shape{3, 256, 82, 1, KvFormat::kFp8DsMla, 5}));

TEST(Query, StridedCacheIsWrittenInItsPagesOnly) {
  CaseOptions options = options_of({6, 128, 8, 1, KvFormat::kFp8DsMla});
  options.page = 128;
  options.stride_rows = 192;
  options.slots = SlotsKind::kOwned;
  const Case c = make_case(options);
  StageRunner want(c, reference_backend());
  want.run(want.backend().query, want.query_args());
  for (const std::string_view target : tested_targets()) {
    SCOPED_TRACE(target);
    StageRunner got(c, *cpu_backend(target));
    got.run(got.backend().query, got.query_args());
    EXPECT_TRUE(kv_cache_agrees(got, want, judged_rows(c, 8)));
  }
}

TEST(Query, NegativeSlotsWriteNothing) {
  CaseOptions options = options_of({1, 128, 17, 1, KvFormat::kFp8});
  options.slots = SlotsKind::kNegative;
  const Case c = make_case(options);
  for (const std::string_view target : tested_targets()) {
    SCOPED_TRACE(target);
    StageRunner got(c, *cpu_backend(target));
    got.run(got.backend().query, got.query_args());
    EXPECT_TRUE(same_bytes(got.kv_bytes.data(), c.kv.data, int64_t(got.kv_bytes.size()), "kv_cache"));
  }
}

int64_t query_bytes(const StageRunner& r) { return r.rows * r.query.heads * kQueryRow * r.query.element; }

/// The first `rows` rows of two runs, bit for bit.
void expect_same_rows(const StageRunner& got, const StageRunner& want, int64_t rows) {
  EXPECT_TRUE(same_bytes(got.q_c.data(), want.q_c.data(), rows * want.q_c.stride(0) * 2, "q_c"));
  EXPECT_TRUE(same_bytes(got.query.data, want.query.data, query_bytes(want) / want.rows * rows, "query"));
}

TEST(Query, SameBitsWithAnyThreadsAndLiveRows) {
  for (const Shape& shape : {Shape{6, 1536, 12, 1, KvFormat::kFp8DsMla}, Shape{5, 256, 70, 1, KvFormat::kFp8}}) {
    const Case c = make_case(options_of(shape));
    for (const std::string_view target : tested_targets()) {
      SCOPED_TRACE(target);
      StageRunner one(c, *cpu_backend(target), 1);
      one.run(one.backend().query, one.query_args());
      for (const int threads : {2, 3, 7}) {
        SCOPED_TRACE(threads);
        StageRunner other(c, *cpu_backend(target), threads);
        other.run(other.backend().query, other.query_args());
        expect_same_rows(other, one, one.rows);
        EXPECT_TRUE(same_bytes(other.kv_bytes.data(), one.kv_bytes.data(), int64_t(one.kv_bytes.size()), "kv_cache"));
      }
      for (const int live : {1, 2, 7, shape.rows - 1}) {
        SCOPED_TRACE(live);
        StageRunner fewer(c, *cpu_backend(target), 2, live);
        fewer.run(fewer.backend().query, fewer.query_args());
        expect_same_rows(fewer, one, live);
      }
    }
  }
}

TEST(Query, BrokenRowHarmsItself) {
  for (const Shape& shape : {Shape{6, 256, 9, 1, KvFormat::kFp8DsMla}, Shape{5, 256, 40, 1, KvFormat::kFp8}}) {
    for (const uint16_t bits : {0x7FC0, 0xFF80, 0x7F7F}) {  // NaN, -infinity, the largest number
      CaseOptions options = options_of(shape);
      options.slots = SlotsKind::kOwned;
      Case c = make_case(options);
      const int64_t broken = shape.rows / 2;
      for (const std::string_view target : tested_targets()) {
        SCOPED_TRACE(target);
        StageRunner clean(c, *cpu_backend(target));
        clean.run(clean.backend().query, clean.query_args());
        std::vector<BFloat16> kept(c.step.projected.row(broken), c.step.projected.row(broken) + c.sizes.width());
        for (int64_t i = 0; i < c.sizes.width(); i += 3) projected_at(c, broken, i) = {bits};
        StageRunner got(c, *cpu_backend(target));
        got.run(got.backend().query, got.query_args());
        std::copy(kept.begin(), kept.end(), &projected_at(c, broken, 0));
        // With the broken row's own outputs put back, nothing may differ.
        std::copy_n(clean.q_c.row(broken), c.sizes.q_lora, got.q_c.row(broken));
        std::memcpy(got.query.at(broken, 0), clean.query.at(broken, 0), size_t(query_bytes(clean) / clean.rows));
        const Slot slot(c.step.slots(broken));
        const PhysicalRow row = physical_row(place_of(slot, c.kv.page), c.kv.stride_rows);
        std::memcpy(row_at(got.kv, row), row_at(clean.kv, row), size_t(c.kv.row_bytes));
        expect_same_rows(got, clean, clean.rows);
        EXPECT_TRUE(same_bytes(got.kv_bytes.data(), clean.kv_bytes.data(), int64_t(clean.kv_bytes.size()), "kv_cache"));
      }
    }
  }
}

// Weights of ones and zeros: x is an element of q_c, or a sum of two, and u is x, so that the roundings of steps 2 to 4
// can be written down. q_c itself is the norm's weight, as q_a is all ones and eps is 0.

/// The query row of PlainLayer for a q_c of 128 values.
std::vector<BFloat16> plain_query(const std::vector<BFloat16>& q_c, bool pairs) {
  std::vector<BFloat16> row(kQueryRow);
  for (int i = 0; i < kQueryRow; ++i) {
    const int k = i % kNope;
    const float x = to_float(q_c[size_t(k)]) + (pairs ? to_float(q_c[size_t(k ^ 64)]) : 0.0f);
    row[size_t(i)] = to_bf16(x);
  }
  return row;
}

void expect_plain_query(PlainLayer& layer, const std::vector<BFloat16>& q_c, bool pairs, int rows) {
  layer.set_q_c(q_c);
  const std::vector<BFloat16> want = plain_query(q_c, pairs);
  const bool fp8 = has_fp8_query(layer.config.kv_format);
  for (const std::string_view target : tested_targets()) {
    const std::vector<std::byte> got = layer.run_query(*cpu_backend(target), rows);
    for (int i = 0; i < rows * kQueryRow; ++i) {
      const BFloat16 x = want[size_t(i % kQueryRow)];
      if (fp8) {
        ASSERT_EQ(int(got[size_t(i)]), int(to_e4m3(to_float(x) * layer.config.q_scale_inv)))
            << target << ", row " << i / kQueryRow << "[" << i % kQueryRow << "], value " << to_float(x);
      } else {
        uint16_t bits;
        std::memcpy(&bits, got.data() + i * 2, 2);
        ASSERT_EQ(bits, x.bits) << target << ", row " << i / kQueryRow << "[" << i % kQueryRow << "]";
      }
    }
  }
}

/// Every normal BF16 number up to the limit of the contract, in blocks of 128.
void for_all_numbers(const std::function<void(const std::vector<BFloat16>&)>& use) {
  std::vector<BFloat16> block;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float magnitude_of = magnitude(to_float({uint16_t(bits)}));
    const bool normal = magnitude_of >= 0x1p-126f && magnitude_of < 0x1p58f;
    if (normal) block.push_back({uint16_t(bits)});
    if (block.size() == 128) {
      use(block);
      block.clear();
    }
  }
}

TEST(Query, EveryNumberAsE4m3) {
  for (const float scale : {1.0f, 7.3f, 0.011f}) {
    for (const int rows : {2, 17}) {
      PlainLayer layer(false);
      layer.config.kv_format = KvFormat::kFp8;
      layer.config.q_scale_inv = scale;
      for_all_numbers([&](const std::vector<BFloat16>& q_c) {
        if (!::testing::Test::HasFatalFailure()) expect_plain_query(layer, q_c, false, rows);
      });
    }
  }
}

TEST(Query, RoundsToNearestEven) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 100; ++trial) {
    // a + b with b around half a unit of a: ties, and sums just beside them.
    std::vector<BFloat16> q_c(128);
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t exponent = 100 + random() % 60;
      q_c[i] = {uint16_t(random() % 2 << 15 | exponent << 7 | random() % 128)};
      const uint32_t near[] = {(exponent - 8) << 7, ((exponent - 8) << 7) + 1, ((exponent - 9) << 7) + 127,
                               (exponent - 9) << 7};
      q_c[i + 64] = {uint16_t(random() % 2 << 15 | near[random() % 4])};
    }
    for (const KvFormat format : {KvFormat::kFp8DsMla, KvFormat::kFp8}) {
      for (const int rows : {1, 33}) {
        PlainLayer layer(true);
        layer.config.kv_format = format;
        layer.config.q_scale_inv = 3.7f;
        expect_plain_query(layer, q_c, true, rows);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(Query, PackTransposesWuk) {
  const Case c = make_case(options_of({3, 128, 1, 1, KvFormat::kFp8}));
  const OwnedModel owned = make_model(c.config, c.weights);
  const Backend& backend = *cpu_backend({});
  ASSERT_EQ(backend.packed_bytes(c.sizes), 3 * 512 * 128 * 2);
  Buffer<BFloat16> packed;
  packed.poison(3 * 512 * 128);
  Threads threads(2);
  backend.pack(owned.model, reinterpret_cast<std::byte*>(packed.data()), threads);
  for (int head = 0; head < 3; ++head) {
    for (int k = 0; k < kNope; ++k) {
      for (int n = 0; n < kLatent; ++n) {
        ASSERT_EQ(packed.data()[(head * kLatent + n) * kNope + k].bits, owned.model.kv_b(head, k, n).bits)
            << head << ", " << k << ", " << n;
      }
    }
  }
}

TEST(Query, KernelFollowsPreparedRows) {
  const Backend& backend = *cpu_backend({});
  for (const int rows : {1, 16, 17, 256}) {
    ShapeKey shape{};
    shape.rows = rows;
    for (const auto& kernel : backend.query) {
      const Verdict verdict = kernel.accepts(shape);
      EXPECT_EQ(verdict.ok, (kernel.name == "few_rows") == (rows <= 16)) << kernel.name << " with " << rows;
      EXPECT_EQ(verdict.reason.empty(), verdict.ok);
    }
  }
}

}  // namespace
}  // namespace dsacore::test
