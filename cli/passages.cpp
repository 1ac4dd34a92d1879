#include "cli/passages.h"

#include <algorithm>

namespace dsacore::cli {
namespace {

constexpr size_t kGap = 6;      // tokens between two selected ones of the same passage
constexpr size_t kAround = 12;  // tokens shown before and after a passage
constexpr std::string_view kParagraph = "\n\n";

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

/// Widened to the words that it begins and ends in, as far as a word can be long.
Span to_words(const TokenText& text, Span within, Span span) {
  constexpr size_t kLongWord = 40;
  Span wide = span;
  while (wide.begin > within.begin && span.begin - wide.begin < kLongWord && !is_space(text.text[wide.begin - 1]))
    --wide.begin;
  while (wide.end < within.end && wide.end - span.end < kLongWord && !is_space(text.text[wide.end])) ++wide.end;
  const bool whole_begin = wide.begin == within.begin || is_space(text.text[wide.begin - 1]);
  const bool whole_end = wide.end == within.end || is_space(text.text[wide.end]);
  return {whole_begin ? wide.begin : span.begin, whole_end ? wide.end : span.end};
}

/// The passage with up to `kAround` tokens around it, but not beyond its paragraph or source.
Span with_surroundings(const TokenText& text, const Passage& passage) {
  Span shown{text.tokens[passage.first].begin, text.tokens[passage.last].end};
  const Span source = text.sources[passage.source].span;
  size_t low = std::max(source.begin, text.tokens[passage.first > kAround ? passage.first - kAround : 0].begin);
  const std::string_view before = text.slice({low, shown.begin});
  if (const size_t at = before.rfind(kParagraph); at != std::string_view::npos) low += at + kParagraph.size();
  size_t high = std::min(source.end, text.tokens[std::min(passage.last + kAround, text.tokens.size() - 1)].end);
  high = std::max(high, shown.end);
  const std::string_view after = text.slice({shown.end, high});
  if (const size_t at = after.find(kParagraph); at != std::string_view::npos) high = shown.end + at;
  return to_words(text, source, {std::min(low, shown.begin), high});
}

Passage make_passage(const TokenText& text, std::span<const size_t> tokens) {
  Passage passage{tokens.front(), tokens.back(), tokens.size(), {}, marked_spans(text, tokens), 0};
  passage.source = text.source_at(text.tokens[passage.first].begin);
  passage.shown = with_surroundings(text, passage);
  return passage;
}

}  // namespace

bool begins_part(const TokenText& text, size_t byte) {
  const Span source = text.sources[text.source_at(byte)].span;
  return byte == source.begin || text.slice({source.begin, byte}).ends_with(kParagraph);
}

bool ends_part(const TokenText& text, size_t byte) {
  if (byte >= text.text.size()) return true;
  const Span source = text.sources[text.source_at(byte)].span;
  return text.slice({byte, source.end}).starts_with(kParagraph);
}

std::vector<Span> marked_spans(const TokenText& text, std::span<const size_t> tokens) {
  std::vector<Span> spans;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const Span token = text.tokens[tokens[i]];
    const bool joins = i > 0 && tokens[i] == tokens[i - 1] + 1 &&
                       text.slice({spans.back().end, token.begin}).find(kParagraph) == std::string_view::npos;
    if (joins) {
      spans.back().end = token.end;
    } else {
      spans.push_back(token);
    }
  }
  return spans;
}

Selection select_passages(const TokenText& text, std::span<const int32_t> token_ids) {
  Selection out;
  for (int32_t id : token_ids) {
    if (id < 0) continue;
    if (size_t(id) < text.tokens.size()) {
      out.tokens.push_back(size_t(id));
    } else {
      ++out.beyond;
    }
  }
  std::sort(out.tokens.begin(), out.tokens.end());
  const auto source_of = [&](size_t token) { return text.source_at(text.tokens[token].begin); };
  for (size_t from = 0; from < out.tokens.size();) {
    size_t to = from + 1;
    while (to < out.tokens.size() && out.tokens[to] - out.tokens[to - 1] <= kGap + 1 &&
           source_of(out.tokens[to]) == source_of(out.tokens[from])) {
      ++to;
    }
    out.passages.push_back(make_passage(text, std::span(out.tokens).subspan(from, to - from)));
    from = to;
  }
  const auto score = [](const Passage& p) { return double(p.selected) * p.density(); };
  std::stable_sort(out.passages.begin(), out.passages.end(),
                   [&](const Passage& a, const Passage& b) { return score(a) > score(b); });
  return out;
}

}  // namespace dsacore::cli
