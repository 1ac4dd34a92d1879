// Step files (spec 8): one decode step and the caches it runs on. file -> mapping -> Step, KvCache, IndexCache for
// PreparedLayer. The caches can be updated in place: the mapping is private, the file does not change.
#pragma once

#include <string>

#include "dsacore/problem.h"
#include "io/file_fields.h"
#include "io/layer_file.h"
#include "io/safetensors.h"
#include "io/tensor_view.h"

namespace dsacore {

/// A step as its file holds it. All views borrow from `file`, also after a move.
struct StepFile {
  Step step;          ///< `batch` = B, every request given, `out` empty; `projected` [B, pitch] until check_agreement
  KvCache kv;         ///< `format` is check_agreement's to set: a step file does not know it
  IndexCache index;   ///< likewise
  bool flat = false;  ///< the MLA cache has two axes in the file: pages lie `stride_rows` apart
  UnknownFields unknown;
  SafetensorsFile file;
};

/// Reads a step file of version 1. Shapes are checked against each other; what slots, pages and lengths point at is
/// `run`'s to check. Throws `kIo`, `kMalformedFile` or `kRefused`, naming the file, the tensor or key, its value and
/// what is allowed.
StepFile read_step_file(const std::string& path);
/// The same for a file that is open or in memory.
StepFile parse_step_file(SafetensorsFile file);

/// Refuses a step whose shapes disagree with the layer (spec 10): a pitch narrower than the row, cache rows that do not
/// fit the formats. Then sets the formats of the caches and narrows `projected` to [B, width].
void check_agreement(const LayerFile& layer, StepFile& step);

/// Writes a step file of version 1: `projected` to its full pitch (all of which must be readable), the MLA cache with
/// two axes where `stride_rows` is above the page. Throws `kIo`.
void write_step_file(const std::string& path, const Step& step, const KvCache& kv, const IndexCache& index);

/// The MLA cache as a tensor of a file: [pages, P, row], or where `flat` [(pages - 1) * stride_rows + P, row].
TensorView cache_tensor(const KvCache& kv, bool flat);
/// The same, flat where `stride_rows` is above the page.
TensorView cache_tensor(const KvCache& kv);
TensorView cache_tensor(const IndexCache& index);

}  // namespace dsacore
