// The text that token ids stand for: tokens.json with the questions (rows), the text, where each token begins and ends
// in it (characters), and the names of the files that it was joined from.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace dsacore::cli {

/// Half-open range of bytes of the text.
struct Span {
  size_t begin = 0, end = 0;
};

struct TextSource {
  std::string name;
  Span span;
};

struct TokenText {
  std::vector<std::string> rows;  ///< what each row asks
  std::string text;               ///< UTF-8
  std::vector<Span> tokens;       ///< ascending
  /// The parts of the text by file, in order; a single unnamed one where it cannot be told where each begins.
  std::vector<TextSource> sources;

  std::string_view slice(Span span) const { return std::string_view(text).substr(span.begin, span.end - span.begin); }
  /// Number of the source that holds a byte.
  size_t source_at(size_t byte) const;
};

/// Keys: rows, text, begin, end, sources; optional `source_begin` (characters), else the sources are taken apart at the
/// blank lines that joined them, where that is unambiguous. Throws `kIo` or `kMalformedFile` naming the key.
TokenText read_token_text(const std::string& path);

}  // namespace dsacore::cli
