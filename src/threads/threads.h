// Threads: the one place where work is spread over cores. oneTBB behind it, or a small std::thread team where
// DSACORE_THREAD_TEAM is defined (the tsan preset: a distribution's oneTBB is not instrumented).
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

namespace dsacore {

/// Borrows a callable for the length of one call; never allocates.
template <class Signature>
class FunctionRef;
template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef>)
  FunctionRef(F&& f)
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))), call_([](void* o, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(o))(std::forward<Args>(args)...);
        }) {}
  R operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

class Threads {
 public:
  /// `count >= 1` threads, the caller's included.
  explicit Threads(int count);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return count_; }

  /// Runs `body(task, worker)` for every task in 0..tasks-1, in any order, and returns when all are done. `worker` is
  /// 0..count()-1, and no two tasks run at once under one worker number. What a task computes must not depend on
  /// `worker`.
  void for_each(int64_t tasks, FunctionRef<void(int64_t task, int worker)> body);

  /// Called after each task, from the worker's thread (the DCP heartbeat). Null: nothing is called.
  void set_progress(void (*progress)(void* context), void* context) {
    progress_ = progress;
    progress_context_ = context;
  }

 private:
  struct Team;
  int count_;
  void (*progress_)(void*) = nullptr;
  void* progress_context_ = nullptr;
  std::unique_ptr<Team> team_;
};

}  // namespace dsacore
