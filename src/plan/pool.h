// Pool: things that are kept once made, each held by one owner at a time.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace dsacore {

/// Made by `std::make_shared`; lives as long as it or one of its things is held. Thread-safe.
template <class Thing>
class Pool : public std::enable_shared_from_this<Pool<Thing>> {
 public:
  /// The first thing that nobody holds and that `usable` takes, else a new one of `make`; comes back when its last
  /// owner lets it go.
  std::shared_ptr<Thing> take(const std::function<bool(const Thing&)>& usable,
                              const std::function<std::unique_ptr<Thing>()>& make) {
    std::unique_ptr<Thing> thing = take_free(usable);
    if (thing == nullptr) thing = make();
    return {thing.release(), [pool = this->shared_from_this()](Thing* back) { pool->give_back(back); }};
  }

 private:
  std::unique_ptr<Thing> take_free(const std::function<bool(const Thing&)>& usable) {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(free_.begin(), free_.end(), [&](const auto& thing) { return usable(*thing); });
    if (found == free_.end()) return nullptr;
    std::unique_ptr<Thing> thing = std::move(*found);
    free_.erase(found);
    return thing;
  }
  void give_back(Thing* back) {
    std::unique_ptr<Thing> thing(back);
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(thing));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Thing>> free_;
};

}  // namespace dsacore
