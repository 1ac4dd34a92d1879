// Strong ids and views: what must not compile does not, and what does costs nothing.
#include "dsacore/ids.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <type_traits>

#include "dsacore/view.h"
#include "format/paging.h"

namespace dsacore {
namespace {

template <class... Ids>
constexpr bool never_mix() {
  const auto apart = []<class A>(A*) {
    constexpr bool kFromRaw =
        !std::is_convertible_v<int32_t, A> && !std::is_convertible_v<int64_t, A> && std::is_constructible_v<A, int32_t>;
    constexpr bool kToRaw = !std::is_convertible_v<A, int32_t> && !std::is_convertible_v<A, int64_t> &&
                            !std::is_convertible_v<A, bool> && !std::is_constructible_v<int64_t, A>;
    constexpr bool kOthers = ((std::is_same_v<A, Ids> || !std::is_constructible_v<A, Ids>)&&...);
    constexpr bool kAssign = ((std::is_same_v<A, Ids> || !std::is_assignable_v<A&, Ids>)&&...);
    return kFromRaw && kToRaw && kOthers && kAssign && std::is_trivially_copyable_v<A>;
  };
  return (apart(static_cast<Ids*>(nullptr)) && ...);
}
static_assert(never_mix<TokenId, LocalId, PageId, Slot, PhysicalRow>());

template <class A, class B>
concept Comparable = requires(A a, B b) { a == b; } || requires(A a, B b) { a < b; };
template <class A, class B>
concept Addable = requires(A a, B b) { a + b; } || requires(A a, B b) { a - b; } || requires(A a) { ++a; };
static_assert(Comparable<TokenId, TokenId> && !Comparable<TokenId, LocalId> && !Comparable<TokenId, int>);
static_assert(!Comparable<PageId, PhysicalRow> && !Comparable<Slot, PhysicalRow>);
static_assert(!Addable<TokenId, TokenId> && !Addable<TokenId, int> && !Addable<Slot, int64_t>);

// The functions of paging.h take the id that they mean and no other.
static_assert(std::is_invocable_v<decltype(owns), RankShard, TokenId>);
static_assert(!std::is_invocable_v<decltype(owns), RankShard, LocalId> &&
              !std::is_invocable_v<decltype(owns), RankShard, int>);
static_assert(!std::is_invocable_v<decltype(local_of), RankShard, LocalId>);
static_assert(!std::is_invocable_v<decltype(global_of), RankShard, TokenId>);
static_assert(!std::is_invocable_v<decltype(kv_place), const int32_t*, int, TokenId>);
static_assert(!std::is_invocable_v<decltype(index_place), const int32_t*, const int32_t*, int, TokenId>);
static_assert(!std::is_invocable_v<decltype(place_of), PhysicalRow, int> &&
              !std::is_invocable_v<decltype(place_of), int64_t, int>);
static_assert(!std::is_invocable_v<decltype(row_at), KvCache, Slot> &&
              !std::is_invocable_v<decltype(row_at), KvCache, int>);

static_assert(sizeof(TokenId) == 4 && sizeof(LocalId) == 4 && sizeof(PageId) == 4);
static_assert(sizeof(Slot) == 8 && sizeof(PhysicalRow) == 4);

TEST(StrongId, HoldsItsValue) {
  EXPECT_EQ(TokenId().value(), 0);
  EXPECT_EQ(TokenId(7).value(), 7);
  EXPECT_EQ(Slot(-1).value(), -1);
  EXPECT_EQ(Slot(int64_t(1) << 40).value(), int64_t(1) << 40);
  EXPECT_TRUE(TokenId(3) == TokenId(3));
  EXPECT_FALSE(TokenId(3) == TokenId(4));
  EXPECT_TRUE(TokenId(3) < TokenId(4));
  EXPECT_FALSE(TokenId(4) < TokenId(4));
}

// A view of constants comes from a view of variables, never the other way, and never from another type or rank.
static_assert(std::is_convertible_v<View<int, 2>, View<const int, 2>>);
static_assert(!std::is_constructible_v<View<int, 2>, View<const int, 2>>);
static_assert(!std::is_convertible_v<View<float, 2>, View<const int, 2>>);
static_assert(!std::is_convertible_v<View<int, 1>, View<const int, 2>>);
static_assert(!std::is_convertible_v<int*, View<int, 1>>);

TEST(View, IndexesRowMajor) {
  int data[24];
  for (int i = 0; i < 24; ++i) data[i] = i;
  const View<int, 3> v(data, 2, 3, 4);
  EXPECT_EQ(v.size(), 24);
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 3; ++j) {
      for (int k = 0; k < 4; ++k) EXPECT_EQ(v(i, j, k), (i * 3 + j) * 4 + k);
      EXPECT_EQ(v.row(i, j), data + (i * 3 + j) * 4);
    }
    EXPECT_EQ(v.row(i), data + i * 12);
  }
}

TEST(View, Pitch) {
  int data[20] = {};
  const View<int, 2> v = View<int, 2>(data, 3, 5).with_pitch(7);
  v(2, 4) = 9;
  EXPECT_EQ(data[18], 9);
  EXPECT_EQ(v.stride(0), 7);
  EXPECT_EQ(v.stride(1), 1);
  const View<const int, 2> first = v.first(2);
  EXPECT_EQ(first.extent(0), 2);
  EXPECT_EQ(first.extent(1), 5);
  EXPECT_EQ(first.row(1), data + 7);
}

TEST(View, DefaultIsEmpty) {
  EXPECT_TRUE((View<int, 2>().empty()));
  int x = 0;
  EXPECT_FALSE((View<int, 1>(&x, 1).empty()));
}

}  // namespace
}  // namespace dsacore
