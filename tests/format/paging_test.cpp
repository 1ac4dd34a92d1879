// Paging and ownership against enumeration.
#include "format/paging.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace dsacore {
namespace {

TEST(Ownership, MatchesEnumeration) {
  constexpr int kTokens = 3000;
  for (const int ranks : {1, 2, 4, 8}) {
    for (const int interleave : {1, 2, 3, 64}) {
      std::vector<int> held(size_t(ranks), 0);  // tokens that each rank holds so far
      for (int t = 0; t < kTokens; ++t) {
        // Tokens are dealt out in runs of `interleave`.
        const int owner = t / interleave - t / interleave / ranks * ranks;
        for (int rank = 0; rank < ranks; ++rank) {
          const RankShard shard{ranks, rank, interleave};
          ASSERT_EQ(local_count(shard, t), held[size_t(rank)]) << ranks << " " << rank << " " << interleave << " " << t;
          ASSERT_EQ(owns(shard, TokenId(t)), rank == owner) << ranks << " " << rank << " " << interleave << " " << t;
        }
        const RankShard shard{ranks, owner, interleave};
        const int local = held[size_t(owner)]++;
        ASSERT_EQ(local_of(shard, TokenId(t)).value(), local) << ranks << " " << owner << " " << interleave << " " << t;
        ASSERT_EQ(global_of(shard, LocalId(local)).value(), t)
            << ranks << " " << owner << " " << interleave << " " << t;
      }
    }
  }
}

TEST(Ownership, LongestContext) {
  for (const int ranks : {1, 2, 4, 8}) {
    for (const int interleave : {1, 2, 3, 64}) {
      int64_t sum = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const RankShard shard{ranks, rank, interleave};
        const int64_t count = local_count(shard, kMaxContext);
        sum += count;
        const TokenId last = global_of(shard, LocalId(int32_t(count - 1)));
        EXPECT_LT(last.value(), kMaxContext);
        EXPECT_GE(global_of(shard, LocalId(int32_t(count))).value(), kMaxContext);
        EXPECT_TRUE(owns(shard, last));
        EXPECT_EQ(local_of(shard, last).value(), count - 1);
      }
      EXPECT_EQ(sum, kMaxContext);
    }
  }
}

TEST(Ownership, OneRankIsTheIdentity) {
  for (const int interleave : {1, 3, 64}) {
    const RankShard shard{1, 0, interleave};
    for (const int t : {0, 1, 63, 64, 1048575}) {
      EXPECT_TRUE(owns(shard, TokenId(t)));
      EXPECT_EQ(local_of(shard, TokenId(t)).value(), t);
      EXPECT_EQ(global_of(shard, LocalId(t)).value(), t);
      EXPECT_EQ(local_count(shard, t), t);
    }
  }
}

TEST(KeysSeen, CountsTheTokensUpToTheRowsOwn) {
  for (const int q : {1, 2, 3, 8}) {
    for (int64_t seq_len = 0; seq_len < 20; ++seq_len) {
      for (int position = 0; position < q; ++position) {
        // The row's own token is the one `q - position` from the end; it sees the tokens up to it.
        int64_t seen = 0;
        for (int64_t t = 0; t < seq_len; ++t) seen += t <= seq_len - q + position;
        EXPECT_EQ(keys_seen(seq_len, q, position), seen) << q << " " << seq_len << " " << position;
      }
    }
  }
}

TEST(Pages, Count) {
  EXPECT_EQ(pages_of(0, 64), 0);
  EXPECT_EQ(pages_of(1, 64), 1);
  EXPECT_EQ(pages_of(64, 64), 1);
  EXPECT_EQ(pages_of(65, 64), 2);
  EXPECT_EQ(pages_of(2048, 2048), 1);
  EXPECT_EQ(pages_of(1048576, 64), 16384);
}

TEST(Pages, PlaceOfSlot) {
  for (const int page : {64, 128, 2048}) {
    int64_t slot = 0;
    for (int32_t id = 0; id < 3; ++id) {
      for (int offset = 0; offset < page; ++offset, ++slot) {
        ASSERT_EQ(place_of(Slot(slot), page).page.value(), id);
        ASSERT_EQ(place_of(Slot(slot), page).offset, offset);
      }
    }
  }
  const Place far = place_of(Slot(int64_t(2'000'000'000) * 64 + 63), 64);
  EXPECT_EQ(far.page.value(), 2'000'000'000);
  EXPECT_EQ(far.offset, 63);
}

TEST(Pages, PlaceOfToken) {
  const std::vector<int32_t> table = {5, 0, 9, 2};
  for (const int page : {64, 128, 2048}) {
    int32_t t = 0;
    for (const int32_t id : table) {
      for (int offset = 0; offset < page; ++offset, ++t) {
        const Place place = kv_place(table.data(), page, LocalId(t));
        ASSERT_EQ(place.page.value(), id);
        ASSERT_EQ(place.offset, offset);
        // A cache page of P rows is P / 64 index pages in a row.
        const Place derived = index_place(table.data(), nullptr, page, LocalId(t));
        ASSERT_EQ(derived.page.value() * 64 + derived.offset, id * page + offset);
        ASSERT_LT(derived.offset, 64);
      }
    }
  }
}

TEST(Pages, IndexTableOfItsOwn) {
  const std::vector<int32_t> table = {1};
  const std::vector<int32_t> index_table = {7, 3, 8};
  for (int32_t t = 0; t < 192; ++t) {
    const Place place = index_place(table.data(), index_table.data(), 2048, LocalId(t));
    ASSERT_EQ(place.page.value(), index_table[size_t(t / 64)]);
    ASSERT_EQ(place.offset, t % 64);
  }
}

TEST(PhysicalRows, StridedPages) {
  EXPECT_EQ(physical_row({PageId(3), 5}, 64).value(), 197);
  EXPECT_EQ(physical_row({PageId(3), 5}, 384).value(), 1157);
  EXPECT_EQ(physical_row({PageId(0), 0}, 384).value(), 0);
  EXPECT_EQ(physical_row({PageId(30'000'000), 63}, 64).value(), 1'920'000'063) << "beyond 2^30";

  std::vector<std::byte> bytes(10);
  KvCache kv;
  kv.data = bytes.data();
  kv.row_bytes = 656;
  EXPECT_EQ(row_at(kv, PhysicalRow(0)) - bytes.data(), 0);
  kv.row_bytes = 1;
  EXPECT_EQ(row_at(kv, PhysicalRow(7)) - bytes.data(), 7);
}

}  // namespace
}  // namespace dsacore
