// One self-contained HTML page that shows what each row selected of a text: passages first, then the whole text with
// the selection marked and a map of it. No scripts, no files beside it.
#pragma once

#include <string>
#include <vector>

#include "cli/passages.h"

namespace dsacore::cli {

struct TextPage {
  std::string title;  ///< e.g. the output file's name
  const TokenText* text = nullptr;
  std::vector<Selection> rows;  ///< what each row selected
};

/// The page; everything from the text is escaped.
std::string page_html(const TextPage& page);

/// `text` with &, <, >, quotes as entities, and control characters but newline and tab left out.
std::string escape_html(std::string_view text);

}  // namespace dsacore::cli
