#include "cli/files.h"

#include <fstream>

#include "dsacore/status.h"

namespace dsacore::cli {

void write_file(const char* argument, const std::string& path, std::string_view text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  out.close();
  if (!out) throw Exception({ErrorCode::kIo, argument, path, "cannot be written"});
}

}  // namespace dsacore::cli
