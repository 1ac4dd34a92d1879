#include "plan/arena.h"

#include <gtest/gtest.h>

#include "dsacore/status.h"

namespace dsacore {
namespace {

TEST(ScratchArena, BuffersGrowAndKeepTheirRecord) {
  ScratchArena arena(host_memory());
  EXPECT_EQ(arena.missing("scores", 1000), 1000);
  const MemoryBlock* first = arena.book("scores", 1000);
  ASSERT_NE(first->data(), nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first->data()) % 64, 0u);
  EXPECT_EQ(arena.missing("scores", 1500), 500);
  EXPECT_EQ(arena.missing("scores", 10), 0);
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
  ScratchArena arena(host_memory());
  try {
    arena.book("scores", int64_t(1) << 62);
    ADD_FAILURE();
  } catch (const Exception& e) {
    EXPECT_EQ(e.error().code, ErrorCode::kNoMemory);
    EXPECT_EQ(e.error().argument, "scores");
  }
}

TEST(MemoryBlock, MovesAndMayBeEmpty) {
  MemoryBlock empty(host_memory(), 0, "nothing");
  EXPECT_EQ(empty.data(), nullptr);
  MemoryBlock full(host_memory(), 64, "something");
  std::byte* data = full.data();
  EXPECT_EQ(data[63], std::byte(0));
  host_memory().fill(data, std::byte(7), 64);
  EXPECT_EQ(data[63], std::byte(7));
  MemoryBlock moved(std::move(full));
  EXPECT_EQ(moved.data(), data);
  EXPECT_EQ(moved.size(), 64);
  EXPECT_EQ(full.data(), nullptr);  // NOLINT(bugprone-use-after-move): what a move leaves is promised
}

}  // namespace
}  // namespace dsacore
