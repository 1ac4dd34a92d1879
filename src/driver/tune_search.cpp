#include "driver/tune_search.h"

#include <algorithm>
#include <map>

#include "dsacore/formats.h"
#include "dsacore/problem.h"
#include "plan/overlap.h"

namespace dsacore {
namespace {

/// Measures plans, each once; those that run alike are the same.
class Search {
 public:
  Search(const TunedPlan& start, double gain, const TuneProbe& probe)
      : best_(start), gain_(gain), probe_(probe), start_seconds_(seconds(start)), best_seconds_(start_seconds_) {}

  /// Takes the candidate where it is faster by more than the gain, also when both are measured once more.
  void consider(const TunedPlan& candidate) {
    const double first = seconds(candidate);
    if (!gains(first, best_seconds_)) return;
    const double again = probe_.seconds(candidate.laid_over()), best_again = probe_.seconds(best_.laid_over());
    if (!gains(again, best_again)) return;
    best_ = candidate;
    best_seconds_ = std::max(first, again);
  }

  const TunedPlan& best() const { return best_; }
  TunedTimes times() const { return {start_seconds_, best_seconds_}; }

 private:
  bool gains(double candidate, double best) const { return candidate < best * (1 - gain_); }

  double seconds(const TunedPlan& plan) {
    const BenchPlan laid_over = plan.laid_over();
    const auto [found, added] = known_.try_emplace(probe_.choices(laid_over), 0.0);
    if (added) found->second = probe_.seconds(laid_over);
    return found->second;
  }

  std::map<std::string, double> known_;
  TunedPlan best_;
  double gain_;
  const TuneProbe& probe_;
  double start_seconds_, best_seconds_;
};

void try_overlaps(Search& search, const std::vector<std::string>& overlaps) {
  for (const std::string& overlap : overlaps) {
    TunedPlan plan = search.best();
    plan.overlap = overlap;
    search.consider(plan);
  }
}

/// The mode that serves best where the indexer is not fused, with what was chosen otherwise.
std::string unfused_overlap(const TunedPlan& plan, const TuneSpace& space, double gain, const TuneProbe& probe) {
  if (space.unfused_indexer.empty()) return plan.unfused_overlap;
  TunedPlan unfused = plan;
  unfused.kernels[static_cast<size_t>(StageId::kIndexer)] = space.unfused_indexer;
  unfused.overlap = plan.unfused_overlap;
  Search search(unfused, gain, probe);
  std::vector<std::string> overlaps = space.overlaps;
  std::erase_if(overlaps, [](const std::string& name) { return is_late(overlap_mode_of(name).value()); });
  try_overlaps(search, overlaps);
  return search.best().overlap;
}

bool same_tables(const Tables& a, const Tables& b) {
  bool same = a.overlap.text() == b.overlap.text() && a.unfused_overlap.text() == b.unfused_overlap.text();
  for (size_t stage = 0; stage < a.kernels.size(); ++stage) {
    same = same && a.kernels[stage].text() == b.kernels[stage].text();
  }
  return same;
}

}  // namespace

BenchPlan TunedPlan::laid_over() const {
  BenchPlan plan{overlap, ""};
  for (int stage = 0; stage < kStages; ++stage) {
    const std::string& kernel = kernels[size_t(stage)];
    if (kernel.empty()) continue;
    plan.kernels += (plan.kernels.empty() ? "" : ";") + std::string(kStageNames[size_t(stage)]) + "=" + kernel;
  }
  return plan;
}

TunedPlan search_plan(const TunedPlan& start, const TuneSpace& space, double gain, const TuneProbe& probe,
                      TunedTimes& times) {
  Search search(start, gain, probe);
  try_overlaps(search, space.overlaps);
  const TunedPlan with_mode = search.best();
  for (size_t stage = 0; stage < space.kernels.size(); ++stage) {
    for (const std::string& kernel : space.kernels[stage]) {
      TunedPlan plan = search.best();
      plan.kernels[stage] = kernel;
      search.consider(plan);
    }
  }
  if (search.best() != with_mode) try_overlaps(search, space.overlaps);
  times = search.times();
  TunedPlan found = search.best();
  found.unfused_overlap = unfused_overlap(found, space, gain, probe);
  return found;
}

std::vector<TablesEntry> tuned_entries(std::vector<TunedShape> shapes, const TablesEntry& before,
                                       AlwaysAccepts accepts) {
  std::sort(shapes.begin(), shapes.end(), [](const TunedShape& a, const TunedShape& b) {
    return a.heads != b.heads ? a.heads < b.heads : a.rows < b.rows;
  });
  std::vector<TablesEntry> entries;
  int heads_below = 0;
  for (auto first = shapes.begin(); first != shapes.end();) {
    const auto end = std::find_if(first, shapes.end(), [&](const TunedShape& s) { return s.heads != first->heads; });
    const bool last = end == shapes.end();
    const int heads = last ? kMaxHeads : first->heads;
    std::array<std::vector<std::string>, kStages> kernels;
    std::vector<std::string> overlap, unfused;
    for (int rows = 1; rows <= kMaxRows; ++rows) {
      auto shape = std::find_if(first, end, [&](const TunedShape& s) { return s.rows >= rows; });
      if (shape == end) --shape;
      overlap.push_back(shape->plan.overlap);
      unfused.push_back(shape->plan.unfused_overlap);
      for (size_t stage = 0; stage < kernels.size(); ++stage) {
        const std::string& kernel = shape->plan.kernels[stage];
        const bool named =
            !kernel.empty() && kernel != "auto" && accepts(StageId(int(stage)), kernel, heads_below, heads, rows);
        kernels[stage].push_back(named ? kernel : "");
      }
    }
    TablesEntry entry = before;
    entry.max_heads = last ? 0 : heads;
    for (size_t stage = 0; stage < kernels.size(); ++stage) entry.tables.kernels[stage] = RowTable::of(kernels[stage]);
    entry.tables.overlap = RowTable::of(overlap);
    entry.tables.unfused_overlap = RowTable::of(unfused);
    entries.push_back(std::move(entry));
    heads_below = heads;
    first = end;
  }
  // An entry that says what the next one says is none.
  for (size_t i = entries.size(); i-- > 1;) {
    if (same_tables(entries[i - 1].tables, entries[i].tables)) entries.erase(entries.begin() + ptrdiff_t(i - 1));
  }
  return entries;
}

}  // namespace dsacore
