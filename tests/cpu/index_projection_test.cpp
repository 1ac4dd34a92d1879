// The cpu backend's index projection (steps 6 to 8) against the reference backend within spec 9, and against plain
// formulas where the weights make every sum exact; its bits over threads, live rows and broken neighbours. On every
// target that the machine runs.
#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <memory>
#include <random>

#include "cpu/agreement.h"
#include "cpu/plain_layer.h"
#include "support/targets.h"

namespace dsacore::test {
namespace {

struct Shape {
  int index_heads, q_lora, rows, q;
  IndexFormat format;
  int threads = 2;
};

CaseOptions options_of(const Shape& s) {
  CaseOptions o;
  o.seed = uint64_t(s.index_heads * 1000 + s.rows);
  o.heads = 1;
  o.index_heads = s.index_heads;
  o.q_lora = s.q_lora;
  o.batch = s.rows;
  o.q = s.q;
  o.index_format = s.format;
  o.context = "1-300";
  o.pitch_pad = 3;
  o.slots = SlotsKind::kMixed;
  o.k_norm_bf16 = s.rows % 2 == 0;
  o.no_k_bias = s.rows % 3 == 0;
  return o;
}

/// The stage under a backend, from the q_c of the reference's query stage.
void run_stage(StageRunner& runner, const StageRunner& query) {
  std::copy_n(query.q_c.data(), runner.q_c.size(), runner.q_c.data());
  runner.run(runner.backend().index_projection, runner.index_projection_args());
}

/// A case's q_c.
std::unique_ptr<StageRunner> reference_query(const Case& c) {
  auto runner = std::make_unique<StageRunner>(c, reference_backend());
  runner->run(runner->backend().query, runner->query_args());
  return runner;
}

class IndexProjectionAgreement : public ::testing::TestWithParam<Shape> {
 protected:
  static void compare(const CaseOptions& options, int threads) {
    const Case c = make_case(options);
    const std::unique_ptr<StageRunner> reference = reference_query(c);
    StageRunner& want = *reference;
    want.run(want.backend().index_projection, want.index_projection_args());
    const std::vector<int64_t> rows = judged_rows(c, c.step.batch);
    for (const std::string_view target : tested_targets()) {
      SCOPED_TRACE(target);
      StageRunner got(c, *cpu_backend(target), threads);
      run_stage(got, want);
      EXPECT_TRUE(index_query_agrees(got, want, rows));
      EXPECT_TRUE(index_cache_agrees(got, want, rows));
    }
  }
};

TEST_P(IndexProjectionAgreement, Plain) { compare(options_of(GetParam()), GetParam().threads); }

TEST_P(IndexProjectionAgreement, Adversarial) {
  CaseOptions options = options_of(GetParam());
  options.adversarial = {"all"};
  if (GetParam().rows / GetParam().q > 4) options.pad_requests = 1;
  compare(options, GetParam().threads);
}

INSTANTIATE_TEST_SUITE_P(FewRows, IndexProjectionAgreement,
                         ::testing::Values(Shape{8, 128, 1, 1, IndexFormat::kFp8},
                                           Shape{9, 1536, 3, 1, IndexFormat::kMxfp4, 4},
                                           Shape{32, 2048, 8, 2, IndexFormat::kFp8},
                                           Shape{64, 1536, 16, 1, IndexFormat::kMxfp4, 5}));
INSTANTIATE_TEST_SUITE_P(ManyRows, IndexProjectionAgreement,
                         ::testing::Values(Shape{8, 2048, 17, 1, IndexFormat::kFp8},
                                           Shape{32, 1536, 64, 4, IndexFormat::kMxfp4, 3},
                                           Shape{9, 128, 130, 1, IndexFormat::kFp8},
                                           Shape{64, 256, 33, 3, IndexFormat::kMxfp4}));

TEST(IndexProjection, NegativeSlotsWriteNothing) {
  CaseOptions options = options_of({8, 128, 17, 1, IndexFormat::kMxfp4});
  options.slots = SlotsKind::kNegative;
  const Case c = make_case(options);
  const std::unique_ptr<StageRunner> query = reference_query(c);
  for (const std::string_view target : tested_targets()) {
    SCOPED_TRACE(target);
    StageRunner got(c, *cpu_backend(target));
    run_stage(got, *query);
    EXPECT_TRUE(same_bytes(got.index_bytes.data(), c.index.data, int64_t(got.index_bytes.size()), "index_cache"));
  }
}

/// The first `rows` rows of two runs, bit for bit.
void expect_same_rows(const StageRunner& got, const StageRunner& want, int64_t rows) {
  EXPECT_TRUE(
      same_bytes(got.index_query.data(), want.index_query.data(), rows * want.index_query.stride(0), "index_query"));
  EXPECT_TRUE(same_bytes(got.head_weights.data(), want.head_weights.data(), rows * want.head_weights.stride(0) * 4,
                         "head_weights"));
}

TEST(IndexProjection, SameBitsWithAnyThreadsAndLiveRows) {
  for (const Shape& shape : {Shape{9, 1536, 12, 1, IndexFormat::kFp8}, Shape{8, 256, 70, 1, IndexFormat::kMxfp4}}) {
    const Case c = make_case(options_of(shape));
    const std::unique_ptr<StageRunner> query = reference_query(c);
    for (const std::string_view target : tested_targets()) {
      SCOPED_TRACE(target);
      StageRunner one(c, *cpu_backend(target), 1);
      run_stage(one, *query);
      for (const int threads : {2, 3, 7}) {
        SCOPED_TRACE(threads);
        StageRunner other(c, *cpu_backend(target), threads);
        run_stage(other, *query);
        expect_same_rows(other, one, one.rows);
        EXPECT_TRUE(same_bytes(other.index_bytes.data(), one.index_bytes.data(), int64_t(one.index_bytes.size()),
                               "index_cache"));
      }
      for (const int live : {1, 2, 7, shape.rows - 1}) {
        SCOPED_TRACE(live);
        StageRunner fewer(c, *cpu_backend(target), 2, live);
        run_stage(fewer, *query);
        expect_same_rows(fewer, one, live);
      }
    }
  }
}

TEST(IndexProjection, BrokenRowHarmsItself) {
  for (const Shape& shape : {Shape{8, 256, 9, 1, IndexFormat::kFp8}, Shape{9, 256, 40, 1, IndexFormat::kMxfp4}}) {
    for (const uint16_t bits : {0x7FC0, 0xFF80, 0x7F7F}) {  // NaN, -infinity, the largest number
      CaseOptions options = options_of(shape);
      options.slots = SlotsKind::kOwned;
      const Case c = make_case(options);
      const std::unique_ptr<StageRunner> query = reference_query(c);
      const int64_t broken = shape.rows / 2;
      std::deque<StageRunner> clean;
      for (const std::string_view target : tested_targets()) {
        run_stage(clean.emplace_back(c, *cpu_backend(target)), *query);
      }
      Case spoilt = make_case(options);
      for (int64_t i = 0; i < c.sizes.width(); i += 3) projected_at(spoilt, broken, i) = {bits};
      for (int64_t i = 0; i < c.sizes.q_lora; i += 3) query->q_c(broken, i) = {bits};
      for (size_t i = 0; i < clean.size(); ++i) {
        SCOPED_TRACE(tested_targets()[i]);
        StageRunner& want = clean[i];
        StageRunner got(spoilt, want.backend());
        run_stage(got, *query);
        // With the broken row's own outputs put back, nothing may differ.
        std::copy_n(want.index_query.row(broken), want.index_query.stride(0), got.index_query.row(broken));
        std::copy_n(want.head_weights.row(broken), want.head_weights.stride(0), got.head_weights.row(broken));
        expect_same_rows(got, want, want.rows);
        std::vector<int64_t> others;
        for (int64_t row = 0; row < want.rows; ++row) {
          if (row != broken) others.push_back(row);
        }
        EXPECT_TRUE(index_cache_agrees(got, want, others));
      }
    }
  }
}

/// Step 7 by the words of the specification, for iq values of one head.
struct PlainHead {
  PlainHead(const std::vector<float>& iq, float wv) : codes(iq.size()) {
    float amax = 1e-10f;
    for (const float x : iq) amax = std::fmax(amax, std::fabs(x));
    const double wanted = double(amax / 448.0f);
    const float s = float(std::exp2(std::ceil(std::log2(wanted))));
    for (size_t i = 0; i < iq.size(); ++i) codes[i] = to_e4m3(iq[i] / s);
    weight = wv * s * 0.25f * 0.3f;
  }
  std::vector<uint8_t> codes;
  float weight;
};

void expect_plain_heads(PlainLayer& layer, const std::vector<BFloat16>& q_c, int rows) {
  layer.set_q_c(q_c);
  for (const std::string_view target : tested_targets()) {
    const PlainLayer::IndexOutput got = layer.run_index(*cpu_backend(target), rows);
    for (int head = 0; head < PlainLayer::kIndexHeads; ++head) {
      std::vector<float> iq;
      for (const BFloat16 x : q_c) iq.push_back(to_float(x) * float(1 << 3 * head));
      const PlainHead want(iq, 1.0f);
      for (int row = 0; row < rows; ++row) {
        const int at = row * PlainLayer::kIndexHeads + head;
        ASSERT_EQ(got.weights[size_t(at)], want.weight) << target << ", row " << row << ", head " << head;
        for (int i = 0; i < kIndexDim; ++i) {
          ASSERT_EQ(int(got.query[size_t(at * kIndexDim + i)]), int(want.codes[size_t(i)]))
              << target << ", row " << row << ", head " << head << "[" << i << "], value " << iq[size_t(i)];
        }
      }
    }
  }
}

TEST(IndexProjection, ScalesAndCodesOfEveryMagnitude) {
  PlainLayer layer(false);
  layer.config.index_softmax_scale = 0.25;
  layer.config.index_head_scale = double(0.3f);
  std::mt19937 random(5);
  for (int top = -100; top <= 57 && !::testing::Test::HasFatalFailure(); ++top) {
    // Values up to 2^top times a mantissa that meets a power of two of the scale, 448, exactly now and then; tiny ones
    // beside them.
    std::vector<BFloat16> q_c(128);
    for (BFloat16& x : q_c) {
      const float mantissa = 1.0f + float(random() % 128) / 128;
      x = to_bf16(std::ldexp(random() % 2 ? mantissa : -mantissa, std::max(-126, top - int(random() % 24))));
    }
    q_c[random() % 128] = to_bf16(std::ldexp(top % 3 == 0 ? 1.75f : 1.0f + float(random() % 128) / 128, top));
    for (const int rows : {1, 19}) expect_plain_heads(layer, q_c, rows);
  }
  for (const int rows : {1, 19}) expect_plain_heads(layer, std::vector<BFloat16>(128), rows);  // zeros: s from 1e-10
}

TEST(IndexProjection, KernelFollowsPreparedRows) {
  const Backend& backend = *cpu_backend({});
  for (const int rows : {1, 16, 17, 256}) {
    ShapeKey shape{};
    shape.rows = rows;
    for (const auto& kernel : backend.index_projection) {
      EXPECT_EQ(kernel.accepts(shape).ok, (kernel.name == "few_rows") == (rows <= 16))
          << kernel.name << " with " << rows;
    }
  }
}

}  // namespace
}  // namespace dsacore::test
