// Tables: the kernel of each stage, the overlap mode and the partial format, by rows. Defaults are measured and live in
// data/tables.json, which is compiled in; a file or a prepare option overrides them (layer.md 2).
#pragma once

#include <array>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "dsacore/formats.h"
#include "plan/row_table.h"
#include "plan/stage_id.h"

namespace dsacore {

struct Tables {
  std::array<RowTable, kStages> kernels;  ///< by StageId; "auto" or nothing: the first kernel that accepts
  /// By index format and `q`: before what `kernels` says of the indexer.
  std::map<std::pair<IndexFormat, int>, RowTable> indexers;
  RowTable overlap;
  RowTable unfused_overlap;  ///< instead of a late mode where the indexer is not fused
  RowTable partial;
  std::string source;  ///< where they came from, for messages

  /// For a number of rows; "auto" where the tables say nothing.
  std::string_view kernel_of(StageId stage, IndexFormat index_format, int q, int rows) const;
  /// For a number of rows; serial where the tables say nothing.
  OverlapMode overlap_of(int rows) const;
  OverlapMode unfused_overlap_of(int rows) const;
};

/// The compiled-in text of data/tables.json.
std::string_view builtin_tables();

/// Reads the first entry of a tables text that fits. Throws `kMalformedFile` naming `source` and the key.
Tables read_tables(std::string_view json, std::string_view source, std::string_view backend, std::string_view target,
                   int heads);

/// Overlays tables given at prepare: `kernels` reads "stage=table;stage=table", `overlap` a table of modes. Throws
/// `kRefused`.
void override_tables(Tables& tables, std::string_view kernels, std::string_view overlap);

}  // namespace dsacore
