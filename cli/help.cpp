#include "cli/help.h"

#include <sstream>

namespace dsacore::cli {
namespace {

constexpr size_t kColumn = 30;  // where what an option does begins
constexpr size_t kPage = 104;

std::string wrapped(const std::string& text, size_t width) {
  std::istringstream words(text);
  std::string out, word;
  size_t column = 0;
  while (words >> word) {
    if (column > 0 && column + 1 + word.size() > width) {
      out += '\n';
      column = 0;
    }
    if (column > 0) out += ' ', ++column;
    out += word;
    column += word.size();
  }
  return out;
}

class PageFormatter : public CLI::Formatter {
 public:
  PageFormatter() { column_width(kColumn); }
  std::string make_option_desc(const CLI::Option* option) const override {
    return wrapped(CLI::Formatter::make_option_desc(option), kPage - kColumn);
  }
  std::string make_subcommand(const CLI::App* subcommand) const override {
    std::ostringstream out;
    CLI::detail::format_help(out, subcommand->get_name(), wrapped(subcommand->get_description(), kPage - kColumn),
                             kColumn);
    return out.str();
  }
};

}  // namespace

std::shared_ptr<CLI::Formatter> help_formatter() { return std::make_shared<PageFormatter>(); }

}  // namespace dsacore::cli
