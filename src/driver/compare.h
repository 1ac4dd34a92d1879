// compare: the stage-by-stage agreement of two runs of the same inputs by spec 9. Each stage of the judged run is
// compared with the expected backend's stage on the inputs that the judged one dumped, so that an allowed difference
// counts once.
#pragma once

#include <functional>
#include <vector>

#include "driver/agreement.h"
#include "driver/run_case.h"
#include "plan/registry.h"

namespace dsacore {

/// Spec 9: how far from the threshold the score of an exchanged token may lie.
inline constexpr double kTopkTolerance = 1e-5, kCudaTopkTolerance = 1e-3;

struct CompareOptions {
  double topk_tolerance = kTopkTolerance;
  int threads = 1;
  /// Called before each part with its name; for progress.
  std::function<void(const char* part)> on_part;
};

/// `before`: the inputs with the caches as they were before any run. `expected`: a dumped run of one rank by `backend`.
/// `got`: a dumped run of one rank or more (caches, `topk_rows` and latent are judged where they are there). Rows whose
/// inputs hold a NaN or infinity, and rows that see the key of such a row, are not judged; padded rows must be zero.
std::vector<AgreementLine> compare(const Inputs& before, const Backend& backend, const Outputs& expected,
                                   const Outputs& got, const CompareOptions& options = {});

}  // namespace dsacore
