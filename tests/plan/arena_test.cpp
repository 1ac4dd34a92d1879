#include "plan/arena.h"

#include <gtest/gtest.h>

#include "dsacore/status.h"

namespace dsacore {
namespace {

TEST(ScratchArena, BuffersGrowAndKeepTheirRecord) {
  ScratchArena arena;
  const AlignedBytes* first = arena.book("scores", 1000);
  ASSERT_NE(first->data(), nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first->data()) % 64, 0u);
  EXPECT_EQ(arena.book("scores", 10), first);
  EXPECT_EQ(first->size(), 1000);
  EXPECT_EQ(arena.book("scores", 5000), first);
  EXPECT_EQ(first->size(), 5000);
  first->data()[4999] = std::byte(1);
  arena.book("rows", 3);
  const std::vector<ReservedItem> items = arena.items();
  ASSERT_EQ(items.size(), 2u);
  EXPECT_EQ(items[0].name, "rows");
  EXPECT_EQ(items[0].bytes, 3);
  EXPECT_EQ(items[1].bytes, 5000);
}

TEST(ScratchArena, AnImpossibleSizeIsAnErrorThatNamesIt) {
  ScratchArena arena;
  try {
    arena.book("scores", int64_t(1) << 62);
    ADD_FAILURE();
  } catch (const Exception& e) {
    EXPECT_EQ(e.error().code, ErrorCode::kNoMemory);
    EXPECT_EQ(e.error().argument, "scores");
  }
}

TEST(AlignedBytes, MovesAndMayBeEmpty) {
  AlignedBytes empty(0, "nothing");
  EXPECT_EQ(empty.data(), nullptr);
  AlignedBytes full(64, "something");
  std::byte* data = full.data();
  AlignedBytes moved(std::move(full));
  EXPECT_EQ(moved.data(), data);
  EXPECT_EQ(moved.size(), 64);
}

}  // namespace
}  // namespace dsacore
