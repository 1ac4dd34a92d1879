// The whole layer on D ranks against one rank (spec 7, 9): the same selection bit for bit, the output within the
// tolerance; for every number of ranks, interleave and format.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <vector>

#include "driver/inputs.h"
#include "driver/run_case.h"
#include "io/generate.h"
#include "layer/dcp_support.h"

namespace dsacore {
namespace {

using namespace std::chrono_literals;

constexpr double kLseBound = 2e-3;  // spec 9

std::vector<uint16_t> bits_of_all(const std::vector<BFloat16>& values) {
  std::vector<uint16_t> bits;
  for (const BFloat16 value : values) bits.push_back(value.bits);
  return bits;
}

struct Shape {
  BackendKind backend;
  int ranks;
  int interleave;
  PartialFormat partial;
  KvFormat kv_format;
  IndexFormat index_format;
};

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const int ranks : {2, 4, 8}) {
    for (const int interleave : {1, 3, 64}) {
      for (const PartialFormat partial : {PartialFormat::kBf16, PartialFormat::kProj}) {
        for (const KvFormat kv : {KvFormat::kFp8DsMla, KvFormat::kFp8, KvFormat::kNvfp4DsMla}) {
          for (const IndexFormat index : {IndexFormat::kFp8, IndexFormat::kMxfp4}) {
            all.push_back({BackendKind::kCpu, ranks, interleave, partial, kv, index});
            // The reference backend takes its time: every value of every choice, not every combination.
            if ((interleave == 3) == (index == IndexFormat::kFp8) && (ranks == 4) == (kv == KvFormat::kFp8DsMla)) {
              all.push_back({BackendKind::kReference, ranks, interleave, partial, kv, index});
            }
          }
        }
      }
    }
  }
  return all;
}

CaseOptions options_of(const Shape& shape) {
  CaseOptions options;
  options.seed = uint64_t(shape.ranks) * 100 + uint64_t(shape.interleave);
  options.heads = 8;
  options.batch = 12;
  options.q = 2;
  options.context = "1,2,63,64,65,129,500";  // around topk, pages and interleaves; the last request is padding
  options.kv_format = shape.kv_format;
  options.index_format = shape.index_format;
  options.topk = 64;
  options.index_heads = 8;
  options.q_lora = 256;
  options.pad_requests = 1;
  options.adversarial = {"ties", "equal"};
  return options;
}

class DcpLayer : public ::testing::TestWithParam<Shape> {};

TEST_P(DcpLayer, SelectsWhatOneRankSelectsAndAttendsAlike) {
  const Shape shape = GetParam();
  const Case for_one = make_case(options_of(shape)), for_ranks = make_case(options_of(shape));
  RunOptions options;
  options.backend = shape.backend;
  options.threads = 2;
  options.dump = true;
  const Outputs one = run_case(inputs_of(for_one), options).outputs;
  options.dcp = shape.ranks;
  options.interleave = shape.interleave;
  options.partial = shape.partial;
  options.deadline = 60s;
  const Outputs many = run_case(inputs_of(for_ranks), options).outputs;

  EXPECT_TRUE(test::same_bits(many.stages->topk_tokens, one.stages->topk_tokens, "topk_tokens"));
  EXPECT_TRUE(test::same_bits(many.stages->valid, one.stages->valid, "valid"));
  EXPECT_TRUE(test::same_bits(many.stages->index_query, one.stages->index_query, "index_query"));
  EXPECT_EQ(many.stages->latent.empty(), shape.partial == PartialFormat::kProj);
  ASSERT_EQ(many.stages->lse.size(), one.stages->lse.size());
  for (size_t i = 0; i < one.stages->lse.size(); ++i) {
    const float got = many.stages->lse[i], expected = one.stages->lse[i];
    if (std::isinf(expected)) {
      ASSERT_EQ(got, expected) << "lse at " << i;
    } else {
      ASSERT_NEAR(got, expected, kLseBound) << "lse at " << i;
    }
  }
  expect_out(bits_of_all(many.out), bits_of_all(one.out), size_t(for_one.step.batch), "out");
}

std::string name_of_shape(const ::testing::TestParamInfo<Shape>& info) {
  const Shape& s = info.param;
  return std::string(name_of(s.backend)) + "_D" + std::to_string(s.ranks) + "_I" + std::to_string(s.interleave) + "_" +
         std::string(name_of(s.partial)) + "_" + std::string(name_of(s.kv_format)) + "_" +
         std::string(name_of(s.index_format));
}

INSTANTIATE_TEST_SUITE_P(Shapes, DcpLayer, ::testing::ValuesIn(shapes()), name_of_shape);

// NaN and infinities of one row travel through every mailbox, and harm no other row.
TEST(DcpLayerNan, ARowFullOfNanNeitherHangsNorSpreads) {
  for (const PartialFormat partial : {PartialFormat::kBf16, PartialFormat::kProj}) {
    for (const KvFormat kv : {KvFormat::kFp8DsMla, KvFormat::kNvfp4DsMla}) {
      const Shape shape{BackendKind::kCpu, 4, 1, partial, kv, IndexFormat::kFp8};
      const Case clean = make_case(options_of(shape));
      Case dirty = make_case(options_of(shape));
      constexpr int64_t kRow = 9;  // of the fifth request; its last row sees the key that this one writes
      const std::vector<BFloat16> nan(size_t(dirty.step.projected.extent(1)), BFloat16{0xFFFF});
      std::vector<BFloat16> projected(size_t(dirty.step.projected.extent(0) * dirty.step.projected.extent(1)));
      for (int64_t b = 0; b < dirty.step.projected.extent(0); ++b) {
        std::copy_n(b == kRow ? nan.data() : dirty.step.projected.row(b), nan.size(),
                    projected.begin() + b * ptrdiff_t(nan.size()));
      }
      dirty.step.projected = View<const BFloat16, 2>(projected.data(), dirty.step.projected.extent(0), nan.size());
      RunOptions options;
      options.threads = 2;
      options.dcp = shape.ranks;
      options.partial = partial;
      options.deadline = 60s;
      const std::vector<uint16_t> expected = bits_of_all(run_case(inputs_of(clean), options).outputs.out);
      const std::vector<uint16_t> got = bits_of_all(run_case(inputs_of(dirty), options).outputs.out);
      const size_t width = expected.size() / size_t(clean.step.batch);
      for (size_t i = 0; i < expected.size(); ++i) {
        if (i / width == kRow) continue;
        ASSERT_EQ(got[i], expected[i]) << name_of(partial) << " " << name_of(kv) << " row " << i / width << " column "
                                       << i % width;
      }
    }
  }
}

}  // namespace
}  // namespace dsacore
