// verify_layer: a step of a prepared layer whose inputs lie in a backend's memory, judged by the cpu backend on the
// same bytes (spec 9): what `bench --verify` times is right.
#pragma once

#include <vector>

#include "driver/agreement.h"
#include "driver/placed_inputs.h"
#include "dsacore/layer.h"

namespace dsacore {

/// Host memory that the caches of a step may take, in three copies.
inline constexpr int64_t kMostVerifiedBytes = int64_t(24) << 30;

/// Runs the layer's step once and leaves its output in `placed`. `host`: the same inputs on the host, of which the
/// caches are only described. Throws `kNoMemory` naming "--verify" where the caches are too large, and what running
/// throws.
std::vector<AgreementLine> verify_layer(Context& context, PreparedLayer& layer, const PlacedInputs& placed,
                                        const Inputs& host);

}  // namespace dsacore
