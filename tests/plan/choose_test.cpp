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

std::string_view chosen(int n, const char* table) {
  return choose<GateArgs>(StageId::kGate, kKernels, rows(n), RowTable::parse("kernels", table)).kernel->name;
}

TEST(Choose, TakesTheFirstThatAccepts) {
  EXPECT_EQ(chosen(4, ""), "quick");
  EXPECT_EQ(chosen(5, ""), "plain");
  EXPECT_EQ(chosen(4, "auto"), "quick");
}

TEST(Choose, TheTableDecides) {
  EXPECT_EQ(chosen(4, "plain"), "plain");
  EXPECT_EQ(chosen(2, "1-2:plain,3-4:quick"), "plain");
  EXPECT_EQ(chosen(3, "1-2:plain,3-4:quick"), "quick");
}

TEST(Choose, SaysWhyNotTheOthers) {
  const auto choice = choose<GateArgs>(StageId::kGate, kKernels, rows(5), {});
  ASSERT_EQ(choice.others.size(), 1u);
  EXPECT_EQ(choice.others[0].kernel, "quick");
  EXPECT_EQ(choice.others[0].reason, "more than 4 rows");
}

TEST(Choose, RefusesUnknownAndUnfitKernels) {
  for (const char* table : {"missing", "quick"}) {
    try {
      chosen(5, table);
      ADD_FAILURE() << table;
    } catch (const Exception& e) {
      EXPECT_EQ(e.error().argument, "kernel of gate");
      EXPECT_EQ(e.error().value, table);
    }
  }
}

TEST(Choose, NoKernelAtAllIsUnsupported) {
  try {
    choose<GateArgs>(StageId::kGate, std::span(kKernels, 1), rows(5), {});
    ADD_FAILURE();
  } catch (const Exception& e) {
    EXPECT_EQ(e.error().code, ErrorCode::kUnsupported);
    EXPECT_EQ(e.error().allowed, "quick: more than 4 rows");
  }
}

}  // namespace
}  // namespace dsacore
