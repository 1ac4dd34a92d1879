// Passages: a row's selected tokens as stretches of text, the densest and longest first. tokens of a row -> passages ->
// terminal (inspect_text.cpp) or page (text_page.cpp).
#pragma once

#include <span>
#include <vector>

#include "cli/token_text.h"

namespace dsacore::cli {

struct Passage {
  size_t first = 0, last = 0;  ///< its selected tokens, from the first to the last
  size_t selected = 0;         ///< how many there are
  Span shown;                  ///< the passage with some words around it
  std::vector<Span> marked;    ///< selected stretches: neighbouring tokens with what lies between them
  size_t source = 0;

  size_t length() const { return last - first + 1; }
  double density() const { return double(selected) / double(length()); }
};

struct Selection {
  std::vector<Passage> passages;  ///< best first
  std::vector<size_t> tokens;     ///< ascending, inside the text
  size_t beyond = 0;              ///< selected tokens past the text: those that the step itself inserted
};

/// `token_ids`: the row's `topk_tokens`, -1 from its valid count on.
Selection select_passages(const TokenText& text, std::span<const int32_t> token_ids);

/// Whether a paragraph or a source begins, or ends, at a byte: text that is shown from or to there is not cut.
bool begins_part(const TokenText& text, size_t byte);
bool ends_part(const TokenText& text, size_t byte);

/// Selected stretches of the whole text, ascending.
std::vector<Span> marked_spans(const TokenText& text, std::span<const size_t> tokens);

}  // namespace dsacore::cli
