// Threads: the one place where work is spread over cores. oneTBB brings the threads, or a small std::thread team where
// DSACORE_THREAD_TEAM is on (the tsan preset: a distribution's oneTBB is not instrumented).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace dsacore {

/// Borrows a callable for the length of one call; never allocates.
template <class Signature>
class FunctionRef;
template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef>)
  FunctionRef(F&& f)  // NOLINT(bugprone-forwarding-reference-overload): the constraint leaves copies alone
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))), call_([](void* o, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(o))(std::forward<Args>(args)...);
        }) {}
  R operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

class Crew;  // crew.h

/// Tasks that a worker ran one after the other, on the steady clock.
struct BusySpan {
  std::chrono::steady_clock::time_point begin, end;
};

class Threads {
 public:
  /// `count >= 1` threads, the caller's included.
  explicit Threads(int count);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return count_; }

  /// Runs `work()` on the calling thread while the other threads stand by, so that a `for_each` inside costs under a
  /// microsecond. Not from a task of this object, nor from two threads at once. `work` does not throw.
  void together(FunctionRef<void()> work);

  /// Runs `body(task, worker)` for every task in 0..tasks-1, in any order, and returns when all are done. `worker` is
  /// 0..count()-1, and no two tasks run at once under one worker number. What a task computes must not depend on
  /// `worker`. Not from a task of this object, nor from two threads at once; other objects may be used inside. `body`
  /// does not throw.
  void for_each(int64_t tasks, FunctionRef<void(int64_t task, int worker)> body);

  /// Called after each task, from the worker's thread (the DCP heartbeat). Null: nothing is called.
  void set_progress(void (*progress)(void* context), void* context) {
    progress_ = progress;
    progress_context_ = context;
  }

  /// From now on adds to `log`, of count() lists, when each worker was busy with tasks (null: stop). Tasks less than a
  /// microsecond apart are one span.
  void log_busy(std::vector<std::vector<BusySpan>>* log) { busy_ = log; }

  struct Team;  // team.h

 private:
  static constexpr int kNoLeader = -1;

  int count_;
  int leader_ = kNoLeader;  ///< worker number of the thread inside `together`
  void (*progress_)(void*) = nullptr;
  void* progress_context_ = nullptr;
  std::vector<std::vector<BusySpan>>* busy_ = nullptr;
  std::unique_ptr<Crew> crew_;
  std::unique_ptr<Team> team_;
};

}  // namespace dsacore
