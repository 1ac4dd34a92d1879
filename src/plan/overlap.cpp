#include "plan/overlap.h"

namespace dsacore {
namespace {

bool is_serial(OverlapMode mode) { return mode == OverlapMode::kSerial || mode == OverlapMode::kWait; }

/// The mode of the same place of the query, with a front or a norm before it.
OverlapMode with_front(OverlapMode mode, bool front) {
  if (is_late(mode)) return front ? OverlapMode::kLateFront : OverlapMode::kLate;
  return front ? OverlapMode::kFront : OverlapMode::kFork;
}

}  // namespace

OverlapMode effective_mode(OverlapMode wanted, OverlapMode unfused, const OverlapTraits& traits) {
  if (!traits.has_side) return OverlapMode::kSerial;
  OverlapMode mode = wanted;
  if (is_late(mode) && !traits.fused_indexer) mode = unfused;
  // Late modes place the query behind the select of one rank.
  if (is_late(mode) && (traits.ranks > 1 || !traits.fused_indexer)) {
    mode = with_front(OverlapMode::kFork, is_front(mode));
  }
  if (mode == OverlapMode::kWait && traits.ranks == 1) mode = OverlapMode::kSerial;  // no mailbox to wait for
  if (mode == OverlapMode::kSerial && traits.ranks > 1) mode = OverlapMode::kFork;   // the query polls no mailbox
  if (is_serial(mode)) return mode;
  // The query may come after the index projection only where a front or a norm goes before.
  const bool front = is_front(mode) ? traits.front : !traits.norm;
  if (front ? !traits.front : !traits.norm) return OverlapMode::kSerial;
  return with_front(mode, front);
}

LaunchList::LaunchList(OverlapMode mode, const OverlapTraits& traits) {
  const Launch query_beside{StageId::kQuery, Lane::kSide, true};
  if (is_serial(mode)) add({StageId::kQuery});
  if (mode == OverlapMode::kFork || mode == OverlapMode::kLate) add({StageId::kNorm});
  add({StageId::kIndexProjection});
  if (mode == OverlapMode::kFork || mode == OverlapMode::kFront) add(query_beside);
  add({StageId::kIndexer});
  if (is_late(mode)) add({.stage = StageId::kQuery, .beside = true});
  add({StageId::kSparseCore, Lane::kMain, false, mode == OverlapMode::kFork || mode == OverlapMode::kFront});
  add({StageId::kValueProjection});
  for (Launch& launch : launches_) launch.starts_early = !traits.held[static_cast<size_t>(launch.stage)];
}

bool LaunchList::uses_side() const {
  for (const Launch& launch : *this) {
    if (launch.forks) return true;
  }
  return false;
}

}  // namespace dsacore
