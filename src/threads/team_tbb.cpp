#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/task_arena.h>
#include <tbb/task_group.h>

#include <optional>

#include "threads/team.h"

namespace dsacore {
namespace {

class TbbTeam final : public Threads::Team {
 public:
  explicit TbbTeam(int count) : count_(count), arena_(count) {
    // oneTBB starts no more threads than there are cores unless told to; a count asked for is a count given. The least
    // limit in force counts, so a limit is set only where it is above oneTBB's own, and so never takes threads from
    // others.
    if (count > tbb::info::default_concurrency())
      limit_.emplace(tbb::global_control::max_allowed_parallelism, size_t(count));
  }

  void run(FunctionRef<void(int worker)> leader, FunctionRef<void(int worker)> stand_by) override {
    arena_.execute([&] {
      tbb::task_group others;
      for (int i = 1; i < count_; ++i) others.run([&] { stand_by(tbb::this_task_arena::current_thread_index()); });
      leader(tbb::this_task_arena::current_thread_index());
      others.wait();  // who has not come by now finds the crew closed
    });
  }

 private:
  int count_;
  std::optional<tbb::global_control> limit_;
  tbb::task_arena arena_;
};

}  // namespace

std::unique_ptr<Threads::Team> Threads::Team::make(int count) { return std::make_unique<TbbTeam>(count); }

}  // namespace dsacore
