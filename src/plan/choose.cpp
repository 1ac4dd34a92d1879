#include "plan/choose.h"

namespace dsacore {

std::vector<std::string_view> names_in(std::string_view word) {
  std::vector<std::string_view> names;
  for (;;) {
    const size_t end = word.find('|');
    names.push_back(word.substr(0, end));
    if (end == std::string_view::npos) return names;
    word.remove_prefix(end + 1);
  }
}

bool allows(std::string_view word, std::string_view kernel) {
  if (word == "auto") return true;
  const std::vector<std::string_view> names = names_in(word);
  return std::find(names.begin(), names.end(), kernel) != names.end();
}

}  // namespace dsacore
