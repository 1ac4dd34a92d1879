// Pool: a thing has one holder at a time, and is made only where none is free.
#include "plan/pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace dsacore {
namespace {

struct Thing {
  explicit Thing(int n, int* times_gone = nullptr) : number(n), gone(times_gone) {}
  ~Thing() {
    if (gone != nullptr) ++*gone;
  }
  int number;
  int* gone;
  std::atomic<bool> held{false};
};

bool any(const Thing&) { return true; }

TEST(Pool, GivesAgainWhatCameBack) {
  const auto pool = std::make_shared<Pool<Thing>>();
  int made = 0;
  const auto make = [&] { return std::make_unique<Thing>(made++); };
  std::shared_ptr<Thing> first = pool->take(any, make);
  std::shared_ptr<Thing> second = pool->take(any, make);
  EXPECT_NE(first, second);
  const Thing* freed = first.get();
  first.reset();
  EXPECT_EQ(pool->take(any, make).get(), freed);
  EXPECT_EQ(made, 2);
}

TEST(Pool, PassesOverWhatIsNotUsable) {
  const auto pool = std::make_shared<Pool<Thing>>();
  int made = 0;
  const auto make = [&] { return std::make_unique<Thing>(made++); };
  pool->take(any, make).reset();
  const std::shared_ptr<Thing> other = pool->take([](const Thing& thing) { return thing.number != 0; }, make);
  EXPECT_EQ(other->number, 1);
  EXPECT_EQ(pool->take(any, make)->number, 0) << "it stays for the next";
}

TEST(Pool, LivesWithTheLastHolder) {
  int gone = 0;
  auto pool = std::make_shared<Pool<Thing>>();
  std::shared_ptr<Thing> held = pool->take(any, [&] { return std::make_unique<Thing>(0, &gone); });
  pool.reset();
  EXPECT_EQ(gone, 0);
  held.reset();
  EXPECT_EQ(gone, 1);
}

TEST(Pool, NoTwoThreadsHoldOneThing) {
  const auto pool = std::make_shared<Pool<Thing>>();
  std::atomic<int> made{0}, shared{0};
  const auto take_often = [&] {
    for (int i = 0; i < 2000; ++i) {
      const std::shared_ptr<Thing> thing = pool->take(any, [&] { return std::make_unique<Thing>(made++); });
      if (thing->held.exchange(true)) ++shared;
      thing->held = false;
    }
  };
  std::thread other(take_often);
  take_often();
  other.join();
  EXPECT_EQ(shared, 0);
  EXPECT_LE(made, 2);
}

}  // namespace
}  // namespace dsacore
