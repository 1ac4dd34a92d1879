// Threads::Team: brings the threads of a crew. team_tbb.cpp takes them from oneTBB; team_std.cpp, in its place where
// DSACORE_THREAD_TEAM is on, keeps std::threads of its own.
#pragma once

#include "threads/threads.h"

namespace dsacore {

struct Threads::Team {
  static std::unique_ptr<Team> make(int count);
  virtual ~Team() = default;

  /// Runs `leader(worker)` on the calling thread while up to count - 1 other threads run `stand_by(worker)`; returns
  /// when all have returned. No two of them have one worker number.
  virtual void run(FunctionRef<void(int worker)> leader, FunctionRef<void(int worker)> stand_by) = 0;
};

}  // namespace dsacore
