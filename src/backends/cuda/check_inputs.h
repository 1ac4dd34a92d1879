// The optional check of a step's contents on the device (spec 10): slots, index slots, lengths, block tables. The host
// cannot look at them without waiting, so that a step that points outside its caches is found out by a kernel in front
// of the step's own.
//
// How a step uses it: `enqueue_input_check` goes first, and every stage is given `checked` in place of the step's own
// `seq_lens`, `slots` and `index_slots`. Where the inputs are right these are copies. Where one is wrong all lengths
// are 0 and all slots -1: no stage then reads a page, writes a cache row or leaves the tables' ranges, and `out` is
// zero. The first offender stands in the record until the host clears it (by zeroing it); the host reads it whenever it
// next waits for the queue, and turns it into the Status that the other backends return. Nothing here waits, so that a
// graph may hold it.
#pragma once

#include <optional>

#include "dsacore/status.h"
#include "plan/registry.h"
#include "stages/input_check.h"

namespace dsacore::cuda {

void enqueue_input_check(const InputCheckArgs& args, const Workspace& workspace);

/// The error of a record that the host has fetched, in the words of the other backends; nothing where all was right.
std::optional<Error> offence_of(const InputRecord& record, const InputCheckArgs& args);

}  // namespace dsacore::cuda
