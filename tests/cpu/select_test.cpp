// Step 10 of the cpu backend's indexer over scores of any kind: exact, whatever the scores are.
#include <gtest/gtest.h>

#include "cpu/select_case.h"
#include "support/targets.h"

namespace dsacore::test {
namespace {

void check(const std::string& name, const std::vector<float>& scores) {
  for (const int topk : {1, 2, 16, 500, 2048}) {
    const IndexerCase c = case_of(scores, topk);
    const Placed placed = place(c, {});
    const std::vector<int32_t> want = best_of(scores, topk);
    for (const std::string_view target : tested_instruction_sets()) {
      for (const int threads : {1, topk < 100 ? 5 : 2}) {
        const Selected got = run_indexer(*cpu_backend(target), c, placed, threads);
        ASSERT_EQ(got.tokens == want, true)
            << name << ", n " << scores.size() << ", topk " << topk << ", " << target << ", threads " << threads << ": "
            << first_difference(got.tokens, want, topk);
      }
    }
  }
}

class EveryKind : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Select, EveryKind, testing::Range(0, int(std::size(kKinds))));

TEST_P(EveryKind, SmallContexts) {
  for (const int64_t n : {1, 2, 3, 15, 16, 17, 31, 33, 64, 255, 257, 501, 1025, 2047, 2048, 2049, 2065}) {
    check(kKinds[GetParam()].name, scores_of(kKinds[GetParam()], n));
  }
}

TEST_P(EveryKind, LargeContexts) {
  for (const int64_t n : {8000, 32751, 32769, 100001}) check(kKinds[GetParam()].name, scores_of(kKinds[GetParam()], n));
}

}  // namespace
}  // namespace dsacore::test
