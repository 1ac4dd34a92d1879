// A layer file and a step file that belong together, and the output file of a run: files -> inputs, outputs -> file.
#pragma once

#include <string>

#include "driver/run_case.h"
#include "io/layer_file.h"
#include "io/step_file.h"

namespace dsacore {

struct CaseFiles {
  LayerFile layer;
  StepFile step;

  /// Both files as they are on disk.
  int64_t bytes() const { return layer.file.bytes() + step.file.bytes(); }
};

/// Reads both and checks one against the other. Throws what reading throws.
CaseFiles open_case(const std::string& layer_path, const std::string& step_path);

/// Borrows from the files: a run updates the caches in their private mapping.
Inputs inputs_of(CaseFiles& files);

/// Writes an output file (spec 8); `flat` as in the step file. Throws `kIo`.
void write_outputs(const std::string& path, const Inputs& inputs, const Outputs& outputs, bool flat);

}  // namespace dsacore
