// Where the stages of a step run beside each other (layer.md 3 of the design: "query overlap"): from the mode that the
// tables ask for and what the chosen kernels declare to the list of launches that run.cpp walks. The rules and
// fallbacks are here and nowhere else.
//
//   mode        main lane                                             side lane
//   serial      query, index projection, indexer, sparse core         -
//   wait        the same; under DCP the mailbox is polled by a kernel of its own
//   fork        norm, index projection, indexer, join, sparse core    query
//   front       index front, indexer, join, sparse core               query
//   late        norm, index projection, indexer, query, sparse core   -
//   late_front  index front, indexer, query, sparse core              -
//
// In the late modes the query runs beside the indexer, and yet in one chain: the select, the indexer's last kernel,
// lets it start at once, and the norm or the front, whichever comes first, has left it q_c. A side lane costs the main
// one more, for its first kernel starts after all before it have ended, and fetches weights only then; and where lanes
// join, nothing starts early.
#pragma once

#include <array>
#include <cstdint>

#include "dsacore/formats.h"
#include "plan/stage_id.h"

namespace dsacore {

constexpr bool is_late(OverlapMode mode) { return mode == OverlapMode::kLate || mode == OverlapMode::kLateFront; }
constexpr bool is_front(OverlapMode mode) { return mode == OverlapMode::kFront || mode == OverlapMode::kLateFront; }

/// What decides where stages may run.
struct OverlapTraits {
  int ranks = 1;
  bool has_side = false;       ///< the backend enqueues work: there is a side lane
  bool norm = false;           ///< there is a kernel for `q_c` alone, and the chosen index projection reads `q_c`
  bool front = false;          ///< there is an index projection that norms for itself, and the tables let it be taken
  bool fused_indexer = false;  ///< what comes after it may run beside it
  std::array<bool, kStages> held{};  ///< by StageId: reads inputs before its wait
};

/// The mode that runs where `wanted` is asked for; `unfused` is asked for instead of a late mode where the indexer is
/// not fused.
OverlapMode effective_mode(OverlapMode wanted, OverlapMode unfused, const OverlapTraits& traits);

enum class Lane : uint8_t { kMain, kSide };

/// One stage of a step.
struct Launch {
  StageId stage;
  Lane lane = Lane::kMain;
  bool forks = false;  ///< begins the side lane: waits for what the main lane held before the step
  bool joins = false;  ///< waits for the side lane too
  /// Whether it may be launched before those that it follows have ended, on either lane; the first follows an earlier
  /// step's last. Not a held one.
  bool starts_early = true;
  /// It needs nothing of the stage ahead of it, which lets it start only when all before that stage has ended: it may
  /// run beside that stage, and waits for it at its end.
  bool beside = false;
};

/// The launches of one step of one rank, in the order in which they are enqueued.
class LaunchList {
 public:
  static constexpr int kMost = 6;

  LaunchList() = default;
  /// `mode` as `effective_mode` gave it.
  LaunchList(OverlapMode mode, const OverlapTraits& traits);

  const Launch* begin() const { return launches_.data(); }
  const Launch* end() const { return launches_.data() + size_; }
  int size() const { return size_; }
  bool uses_side() const;
  bool has_norm() const { return size_ > 0 && launches_[0].stage == StageId::kNorm; }

 private:
  void add(Launch launch) { launches_[size_t(size_++)] = launch; }

  std::array<Launch, kMost> launches_{};
  int size_ = 0;
};

}  // namespace dsacore
