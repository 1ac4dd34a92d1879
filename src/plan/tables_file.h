// Writes tables files (docs/tables.md): what `dsacore tune` leaves behind.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plan/tables.h"

namespace dsacore {

/// One entry of a tables file.
struct TablesEntry {
  std::string backend;
  std::string target;  ///< empty: any
  int max_heads = 0;   ///< 0: any
  Tables tables;
};

/// Where and by what the entries were measured; does not decide anything.
struct TablesOrigin {
  std::string device, date, program, measured;
};

/// The text of a tables file: `entries`, then those of `others` (a tables text) that are for other backends, or for
/// other targets of the same one.
std::string tables_text(const std::vector<TablesEntry>& entries, const TablesOrigin& origin, std::string_view others);

}  // namespace dsacore
