#include "plan/choose.h"

#include <gtest/gtest.h>

namespace dsacore {
namespace {

Verdict always(const ShapeKey&) { return {}; }
Verdict few_rows(const ShapeKey& shape) {
  if (shape.rows <= 4) return {};
  return {false, "more than 4 rows"};
}
int64_t no_scratch(const ShapeKey&, int) { return 0; }
void nothing(const GateArgs&, const Workspace&) {}

constexpr Kernel<GateArgs> kKernels[] = {{"quick", few_rows, no_scratch, nothing},
                                         {"plain", always, no_scratch, nothing}};

ShapeKey rows(int n) {
  ShapeKey shape{};
  shape.rows = n;
  return shape;
}

std::string_view chosen(int n, const char* word) {
  return choose<GateArgs>(StageId::kGate, kKernels, rows(n), word).kernel->name;
}

TEST(Choose, TakesTheFirstThatAccepts) {
  EXPECT_EQ(chosen(4, "auto"), "quick");
  EXPECT_EQ(chosen(5, "auto"), "plain");
}

TEST(Choose, TheTableDecides) {
  EXPECT_EQ(chosen(4, "plain"), "plain");
  EXPECT_EQ(chosen(4, "quick"), "quick");
}

TEST(Choose, TakesTheFirstOfThoseThatItMayChooseFrom) {
  EXPECT_EQ(chosen(4, "plain|quick"), "quick") << "the order is the list's";
  EXPECT_EQ(chosen(5, "plain|quick"), "plain");
  EXPECT_EQ(chosen(5, "plain|plain"), "plain");
}

TEST(Choose, SaysWhyNotTheOthers) {
  const auto choice = choose<GateArgs>(StageId::kGate, kKernels, rows(5), "auto");
  ASSERT_EQ(choice.others.size(), 1u);
  EXPECT_EQ(choice.others[0].kernel, "quick");
  EXPECT_EQ(choice.others[0].reason, "more than 4 rows");
  const auto later = choose<GateArgs>(StageId::kGate, kKernels, rows(4), "auto");
  EXPECT_EQ(later.others.at(0).reason, "an earlier one accepts");
  const auto other = choose<GateArgs>(StageId::kGate, kKernels, rows(4), "plain");
  EXPECT_EQ(other.others.at(0).reason, "the tables name others");
}

TEST(Choose, RefusesUnknownAndUnfitKernels) {
  for (const auto& [word, allowed] : {std::pair("missing", "allowed: auto, quick, plain"),
                                      {"plain|missing", "allowed: auto, quick, plain"},
                                      {"plain|", "allowed: auto, quick, plain"},
                                      {"auto|plain", "allowed: auto, quick, plain"},
                                      {"quick", "quick: more than 4 rows"}}) {
    try {
      chosen(5, word);
      ADD_FAILURE() << word;
    } catch (const Exception& e) {
      EXPECT_EQ(e.error().code, ErrorCode::kRefused);
      EXPECT_EQ(e.error().argument, "kernel of gate");
      EXPECT_EQ(e.error().value, word);
      EXPECT_EQ(e.error().allowed, allowed) << word;
    }
  }
}

TEST(Choose, NoKernelAtAllIsUnsupported) {
  try {
    choose<GateArgs>(StageId::kGate, std::span(kKernels, 1), rows(5), "auto");
    ADD_FAILURE();
  } catch (const Exception& e) {
    EXPECT_EQ(e.error().code, ErrorCode::kUnsupported);
    EXPECT_EQ(e.error().allowed, "quick: more than 4 rows");
  }
}

}  // namespace
}  // namespace dsacore
