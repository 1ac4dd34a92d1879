#include "plan/row_table.h"

#include <gtest/gtest.h>

#include "dsacore/status.h"

namespace dsacore {
namespace {

TEST(RowTable, ReadsRangesAndSingleRows) {
  const RowTable table = RowTable::parse("overlap", "1-4:fused,5:split,8-256:wide");
  EXPECT_EQ(table.find(1), "fused");
  EXPECT_EQ(table.find(4), "fused");
  EXPECT_EQ(table.find(5), "split");
  EXPECT_EQ(table.find(6), std::nullopt);
  EXPECT_EQ(table.find(256), "wide");
}

TEST(RowTable, ABareNameHoldsForAllRows) {
  const RowTable table = RowTable::parse("overlap", "late_front");
  EXPECT_EQ(table.find(1), "late_front");
  EXPECT_EQ(table.find(256), "late_front");
}

TEST(RowTable, EmptyTextSaysNothing) { EXPECT_EQ(RowTable::parse("overlap", "").find(1), std::nullopt); }

TEST(RowTable, IsMadeOfANameForEachNumberOfRows) {
  std::vector<std::string> names(256, "b");
  names[0] = "a";
  names[1] = names[2] = "";
  names[255] = "a";
  EXPECT_EQ(RowTable::of(names).text(), "1-1:a,4-255:b,256-256:a");
  EXPECT_EQ(RowTable::of(names).find(4), "b");
  EXPECT_EQ(RowTable::of(names).find(3), std::nullopt);
  EXPECT_EQ(RowTable::of(std::vector<std::string>(256)).text(), "");
}

TEST(RowTable, RefusesWhatItCannotRead) {
  for (const char* text : {"1-4", "1-4:", ":x", "4-1:x", "0-3:x", "1-257:x", "1-4:x,4-8:y", "1-4:x,", "a-b:x",
                           "1-2-3:x", "1-4:x,,5:y", "99999999999:x"}) {
    try {
      RowTable::parse("overlap", text);
      ADD_FAILURE() << text << " was taken";
    } catch (const Exception& e) {
      EXPECT_EQ(e.error().code, ErrorCode::kRefused) << text;
      EXPECT_EQ(e.error().argument, "overlap") << text;
      EXPECT_EQ(e.error().value, text);
    }
  }
}

}  // namespace
}  // namespace dsacore
