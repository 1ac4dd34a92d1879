// The optional check of a step's contents on a device (spec 10): what it is given and what it leaves.
#pragma once

#include <cstdint>

#include "dsacore/problem.h"
#include "format/paging.h"

namespace dsacore {

/// What can be wrong, in the order in which it is looked for (src/layer/check_step.cpp). The checks of slots go over
/// all rows one after the other; the rest are done request by request.
enum class InputCheck : uint32_t {
  kNone,
  kSlot,
  kSlotTwice,
  kIndexSlot,
  kIndexSlotTwice,
  kSeqLen,                ///< outside 0..max_context
  kSeqLenBeyondPages,     ///< more local tokens than were prepared
  kBlockTableWidth,       ///< too few entries for the length
  kBlockTable,            ///< an entry outside the MLA cache
  kIndexBlockTableWidth,  ///< the same of the index block table
  kIndexBlockTable,
  kDerivedIndexPage,      ///< an entry of `block_table` whose index pages lie outside the index cache
  kDerivedLastIndexPage,  ///< the same of the last, partly filled page
};

/// In device memory; all zeros at first.
struct InputRecord {
  InputCheck check;  ///< of the first offender since the record was cleared
  int32_t at;        ///< its row (slots) or request
  int32_t position;  ///< in a table row
  int32_t seq_len;   ///< of the request
  int64_t value;     ///< what was found there
  uint64_t first;    ///< of the check that runs: its first offender so far, 0 for none; 0 between checks
  uint32_t arrived;  ///< of the check that runs: blocks that are through; 0 between checks
};

/// A step's arrays, and the arrays that take their place.
struct CheckedInputs {
  View<int64_t, 1> slots;        ///< [rows]
  View<int64_t, 1> index_slots;  ///< [rows]
  View<int32_t, 1> seq_lens;     ///< [requests]
};
struct InputCheckArgs {
  View<const int64_t, 1> slots;              ///< [rows], at most 256
  View<const int64_t, 1> index_slots;        ///< [rows]
  View<const int32_t, 1> seq_lens;           ///< [requests]
  View<const int32_t, 2> block_table;        ///< [requests, W]
  View<const int32_t, 2> index_block_table;  ///< [requests, W'] or empty
  RankShard shard;
  KvCache kv;             ///< its sizes; no byte of it is touched
  IndexCache index;       ///< the same
  int64_t max_context;    ///< that was prepared, of all ranks together
  int64_t local_context;  ///< longest that was prepared for this rank (ShapeKey::max_context)
  CheckedInputs checked;  ///< out
  InputRecord* record;    ///< in and out
};

}  // namespace dsacore
