#include "cli/suggest.h"

#include <algorithm>
#include <numeric>
#include <string_view>

namespace dsacore::cli {
namespace {

/// Levenshtein distance.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t(0));
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
}

}  // namespace

std::string suggestion(const CLI::App& app, const std::vector<std::string>& arguments) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_lnames().empty()) names.push_back("--" + option->get_lnames().front());
  }
  for (const CLI::App* subcommand : app.get_subcommands({})) names.push_back(subcommand->get_name());
  for (const std::string& argument : arguments) {
    const std::string_view wanted = std::string_view(argument).substr(0, argument.find('='));
    const auto by_distance = [&](const std::string& a, const std::string& b) {
      return distance(wanted, a) < distance(wanted, b);
    };
    const auto nearest = std::min_element(names.begin(), names.end(), by_distance);
    if (nearest != names.end() && distance(wanted, *nearest) <= 1 + wanted.size() / 3)
      return " (did you mean " + *nearest + "?)";
  }
  return {};
}

}  // namespace dsacore::cli
