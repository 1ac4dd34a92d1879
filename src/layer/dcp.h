// The exchanges of one layer run between DCP ranks (spec 7): what of which tensor goes into which mailbox. The
// arithmetic between them belongs to the stages.
//
//   query rows -> all ranks | candidates of rows with n > topk -> all ranks | partials, LSE -> the rank that owns the
//   head
#pragma once

#include <cstdint>
#include <span>

#include "dsacore/status.h"
#include "layer/box.h"
#include "stages/stages.h"
#include "threads/threads.h"

namespace dsacore {

/// While it lives, the tasks of `threads` move the rank's heartbeat: peers wait for a rank that works, however long.
class WorkHeartbeat {
 public:
  WorkHeartbeat(Box::Impl& box, Threads& threads);
  ~WorkHeartbeat();
  WorkHeartbeat(const WorkHeartbeat&) = delete;
  WorkHeartbeat& operator=(const WorkHeartbeat&) = delete;

 private:
  Threads& threads_;
};

/// What a layer run exchanges; all ranks run the same.
struct DcpShape {
  int64_t rows = 0;  ///< live rows, at most the box's cap; may be 0
  int q = 1;
  int partial_width = kLatent;      ///< 512 (`bf16`) or 128 (`proj`)
  View<const int32_t, 1> seq_lens;  ///< [rows / q] global
};

/// One layer run on one rank; it moves the heartbeat from beginning to end. Every run publishes and collects the query,
/// also one without rows: that keeps the two buffers of the mailboxes apart (format/mailbox.h). Publishing never waits,
/// so work may be done between publishing and collecting.
///
/// A run that was begun must collect everything: otherwise words stay behind in the mailboxes, so the box ends on all
/// ranks.
///
/// Each function returns `kPeerLost` where a peer is lost, runs something else, or gave up; so does everything after
/// it.
class BoxRun {
 public:
  BoxRun(Box::Impl& box, Threads& threads, const DcpShape& shape);
  ~BoxRun();
  BoxRun(const BoxRun&) = delete;
  BoxRun& operator=(const BoxRun&) = delete;

  /// Begins the run. `mine` are the query rows [rows, H, 576] of this rank's heads.
  Status publish_query(const QueryRows& mine);
  /// `all` [rows, D*H, 576].
  Status collect_query(const QueryRows& all);

  /// `mine` [rows, topk], of which the rows that see more than topk tokens travel, without their padding.
  Status publish_candidates(View<const Candidate, 2> mine);
  /// `all` [D, rows, topk], padded; the other rows are left as they are.
  Status collect_candidates(View<Candidate, 3> all);

  /// Partials of all heads over this rank's tokens: [rows, D*H, width] and [rows, D*H].
  Status publish_partials(View<const BFloat16, 3> mine, View<const float, 2> lse);
  /// Partials of this rank's heads over each rank's tokens: [D, rows, H, width] and [D, rows, H].
  Status collect_partials(View<BFloat16, 4> all, View<float, 3> lse);

 private:
  int64_t candidates_of(int rank, int64_t row) const;
  bool candidates_travel() const;

  Box::Impl& box_;
  Threads& threads_;
  WorkHeartbeat heartbeat_;
  DcpShape shape_;
  int to_collect_ = 0;  ///< tensors that this run still has to collect
};

/// Collective, at prepare: every rank's `mine` (of one size) to all ranks, in rank order: `all` has D times the size.
Status all_gather(Box::Impl& box, Threads& threads, std::span<const BFloat16> mine, std::span<BFloat16> all);

/// Collective: W_UV transposed of all ranks' heads, BF16 [D*H, 128, 512], to `all`.
Status gather_value_weights(Box::Impl& box, Threads& threads, const LayerModel& model, std::byte* all);

}  // namespace dsacore
