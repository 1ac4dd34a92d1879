// The options of a synthetic case, checked, and the texts among them parsed. Part of generate.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "io/case_keys.h"
#include "io/generate.h"

namespace dsacore {

/// Throws `kRefused` naming the option as the command line spells it, e.g. "--heads".
void check_case_options(const CaseOptions& options);

/// The adversarial kinds asked for. Throws `kRefused` naming "--adversarial".
CaseKinds case_kinds(const CaseOptions& options);

/// `seq_len` of the first `requests` requests. Throws `kRefused` naming "--context".
std::vector<int64_t> case_lengths(const CaseOptions& options, int requests);

}  // namespace dsacore
