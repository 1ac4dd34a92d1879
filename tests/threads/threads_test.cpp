// Threads and FunctionRef, the same for oneTBB and for the std::thread team: every task once, one task at a time under
// a worker number, results visible to the caller, objects independent of each other.
#include "threads/threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "threads/allocations.h"

namespace dsacore {
namespace {

TEST(FunctionRef, CallsLambdasWithStateAndReturnsValues) {
  int calls = 0;
  auto add = [&calls](int a, int b) {
    ++calls;
    return a + b;
  };
  const FunctionRef<int(int, int)> ref = add;
  EXPECT_EQ(ref(2, 3), 5);
  EXPECT_EQ(calls, 1);
  const auto constant = [] { return 7; };
  EXPECT_EQ(FunctionRef<int()>(constant)(), 7);
}

TEST(FunctionRef, BorrowsTheCallable) {
  struct Counter {
    int calls = 0;
    Counter() = default;
    Counter(const Counter&) = delete;
    void operator()() { ++calls; }
  };
  Counter counter;
  const FunctionRef<void()> ref = counter;
  const FunctionRef<void()> copy = ref;
  ref();
  copy();
  EXPECT_EQ(counter.calls, 2);
}

TEST(FunctionRef, ForwardsReferences) {
  int value = 1;
  auto grow = [](int& x) { x *= 10; };
  FunctionRef<void(int&)>{grow}(value);
  EXPECT_EQ(value, 10);
}

class ThreadsOf : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Counts, ThreadsOf, testing::Values(1, 2, 3, 8));

TEST_P(ThreadsOf, Count) { EXPECT_EQ(Threads(GetParam()).count(), GetParam()); }

TEST_P(ThreadsOf, RunsEveryTaskOnce) {
  Threads threads(GetParam());
  for (const int64_t tasks : {0, 1, 2, 3, 7, 64, 1000}) {
    std::vector<std::atomic<int>> runs(size_t(tasks + 1));
    threads.for_each(tasks, [&](int64_t task, int) {
      ASSERT_GE(task, 0);
      ASSERT_LT(task, tasks);
      runs[size_t(task)].fetch_add(1);
    });
    for (int64_t task = 0; task < tasks; ++task) EXPECT_EQ(runs[size_t(task)].load(), 1) << task << " of " << tasks;
  }
}

TEST_P(ThreadsOf, WorkerNumbersAreInRangeAndNeverShared) {
  Threads threads(GetParam());
  std::vector<std::atomic<bool>> running(static_cast<size_t>(GetParam()));
  std::atomic<int> shared{0}, outside{0};
  for (int round = 0; round < 20; ++round) {
    threads.for_each(200, [&](int64_t, int worker) {
      if (worker < 0 || worker >= threads.count()) {
        outside.fetch_add(1);
        return;
      }
      if (running[size_t(worker)].exchange(true)) shared.fetch_add(1);
      for (int i = 0; i < 3; ++i) std::this_thread::yield();
      running[size_t(worker)].store(false);
    });
  }
  EXPECT_EQ(outside.load(), 0);
  EXPECT_EQ(shared.load(), 0);
}

TEST_P(ThreadsOf, WorkIsVisibleToTheCallerAndToTheNextCall) {
  Threads threads(GetParam());
  constexpr int64_t kTasks = 50;
  std::vector<int64_t> values(kTasks, 0);
  for (int64_t round = 0; round < 1000; ++round) {
    // Another task's cell than in the round before, so that threads hand values to each other.
    threads.for_each(kTasks, [&](int64_t task, int) { values[size_t((task * 7 + round) % kTasks)] += task; });
  }
  int64_t sum = 0;
  for (const int64_t value : values) sum += value;
  EXPECT_EQ(sum, 1000 * (kTasks * (kTasks - 1) / 2));
}

TEST_P(ThreadsOf, GivesAsManyThreadsAsAskedFor) {
  Threads threads(GetParam());
  std::atomic<int> arrived{0};
  std::atomic<bool> late{false};
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  // No task ends before all have begun: only `count` threads at once can do it.
  threads.for_each(threads.count(), [&](int64_t, int) {
    arrived.fetch_add(1);
    while (arrived.load() < threads.count() && !late.load()) {
      std::this_thread::yield();
      if (std::chrono::steady_clock::now() > deadline) late.store(true);
    }
  });
  EXPECT_FALSE(late.load()) << arrived.load() << " of " << threads.count() << " threads came";
}

TEST_P(ThreadsOf, CallsInsideTogetherRunEveryTaskOnce) {
  Threads threads(GetParam());
  bool ran = false;
  threads.together([&] {
    ran = true;
    for (int64_t tasks : {0, 1, 2, 3, 7, 100, 1, 5000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(tasks));
      for (int repeat = 1; repeat <= 20; ++repeat) {
        threads.for_each(tasks, [&](int64_t task, int) { runs[size_t(task)].fetch_add(1); });
        for (int64_t task = 0; task < tasks; ++task)
          ASSERT_EQ(runs[size_t(task)].load(), repeat) << "task " << task << " of " << tasks;
      }
    }
    threads.together([&] { threads.for_each(3, [](int64_t, int) {}); });  // together inside together is the same crew
  });
  EXPECT_TRUE(ran);
}

TEST_P(ThreadsOf, CallsProgressAfterEachTask) {
  Threads threads(GetParam());
  std::atomic<int> calls{0};
  std::atomic<int> early{0};
  struct Context {
    std::atomic<int>* calls;
    std::atomic<int> done{0};
    std::atomic<int>* early;
  } context{&calls, {}, &early};
  threads.set_progress(
      [](void* c) {
        auto* seen = static_cast<Context*>(c);
        if (seen->calls->fetch_add(1) >= seen->done.load()) seen->early->fetch_add(1);
      },
      &context);
  for (const int tasks : {0, 1, 5, 300}) {
    calls = 0;
    context.done = 0;
    threads.for_each(tasks, [&](int64_t, int) { context.done.fetch_add(1); });
    EXPECT_EQ(calls.load(), tasks);
  }
  EXPECT_EQ(early.load(), 0) << "calls that came before their task was done";
  calls = 0;
  threads.set_progress(nullptr, nullptr);
  threads.for_each(10, [](int64_t, int) {});
  EXPECT_EQ(calls.load(), 0);
}

TEST_P(ThreadsOf, TasksMayUseAnotherObject) {
  Threads outer(GetParam());
  constexpr int kTasks = 6, kInner = 20;
  std::vector<std::unique_ptr<Threads>> inner;
  for (int i = 0; i < kTasks; ++i) inner.push_back(std::make_unique<Threads>(2));
  std::vector<std::atomic<int>> runs(kTasks * kInner);
  std::vector<std::atomic<bool>> running(static_cast<size_t>(GetParam()));
  std::atomic<int> shared{0};
  outer.for_each(kTasks, [&](int64_t task, int worker) {
    if (running[size_t(worker)].exchange(true)) shared.fetch_add(1);
    inner[size_t(task)]->for_each(kInner, [&](int64_t i, int) {
      std::this_thread::yield();
      runs[size_t(task * kInner + i)].fetch_add(1);
    });
    running[size_t(worker)].store(false);
  });
  for (size_t i = 0; i < runs.size(); ++i) EXPECT_EQ(runs[i].load(), 1) << i;
  EXPECT_EQ(shared.load(), 0) << "an outer task began while another waited under the same worker number";
}

TEST_P(ThreadsOf, ObjectsOfDifferentCallersRunAtOnce) {
  constexpr int kTasks = 40, kRounds = 100;
  const auto use = [&](std::vector<int64_t>* sums) {
    Threads threads(GetParam());
    std::vector<int64_t> of_worker(size_t(threads.count()), 0);
    for (int round = 0; round < kRounds; ++round) {
      threads.for_each(kTasks, [&](int64_t task, int worker) { of_worker[size_t(worker)] += task; });
    }
    *sums = of_worker;
  };
  std::vector<int64_t> a, b;
  std::thread first(use, &a), second(use, &b);
  first.join();
  second.join();
  for (const auto* sums : {&a, &b}) {
    int64_t sum = 0;
    for (const int64_t s : *sums) sum += s;
    EXPECT_EQ(sum, int64_t(kRounds) * kTasks * (kTasks - 1) / 2);
  }
}

TEST_P(ThreadsOf, LogWhenEachWorkerWasBusy) {
  using Clock = std::chrono::steady_clock;
  constexpr int kTasks = 20;
  constexpr std::chrono::microseconds kTask(200);
  Threads threads(GetParam());
  std::vector<std::vector<BusySpan>> busy(static_cast<size_t>(threads.count()));
  const auto wait = [&](int64_t, int) {
    for (const Clock::time_point end = Clock::now() + kTask; Clock::now() < end;) {
    }
  };
  threads.log_busy(&busy);
  const Clock::time_point begin = Clock::now();
  threads.for_each(kTasks, wait);
  const Clock::time_point end = Clock::now();
  threads.log_busy(nullptr);
  threads.for_each(kTasks, wait);
  Clock::duration all{};
  for (const std::vector<BusySpan>& spans : busy) {
    Clock::time_point last = begin;
    for (const BusySpan& span : spans) {
      EXPECT_GE(span.begin, last);
      EXPECT_GE(span.end, span.begin);
      last = span.end;
      all += span.end - span.begin;
    }
    EXPECT_LE(last, end);
  }
  EXPECT_GE(all, kTasks * kTask);
  if (GetParam() == 1) {
    EXPECT_LT(busy[0].size(), size_t(kTasks)) << "one span for tasks without a pause between them";
  }
}

TEST_P(ThreadsOf, CallsDoNotAllocate) {
  Threads threads(GetParam());
  const auto call = [&] { threads.for_each(100, [](int64_t, int) { std::this_thread::yield(); }); };
  for (int i = 0; i < 10; ++i) call();  // threads start, and start-up may allocate
  const int64_t before = allocations();
  for (int i = 0; i < 100; ++i) call();
  EXPECT_EQ(allocations() - before, 0);
}

}  // namespace
}  // namespace dsacore
