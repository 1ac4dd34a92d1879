// Text files that commands write.
#pragma once

#include <string>
#include <string_view>

namespace dsacore::cli {

/// Throws `kIo` naming `argument` where the file cannot be written.
void write_file(const char* argument, const std::string& path, std::string_view text);

}  // namespace dsacore::cli
