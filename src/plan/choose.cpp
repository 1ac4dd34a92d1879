#include "plan/choose.h"

namespace dsacore {

bool allows(std::string_view word, std::string_view kernel) {
  if (word == "auto") return true;
  const std::vector<std::string_view> names = split(word, '|');
  return std::find(names.begin(), names.end(), kernel) != names.end();
}

}  // namespace dsacore
