#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/files.h"
#include "cli/inspect.h"
#include "cli/passages.h"
#include "cli/terminal.h"
#include "cli/text_page.h"
#include "dsacore/status.h"
#include "io/out_file.h"

namespace dsacore::cli {
namespace {

constexpr std::string_view kIndent = "    ";

std::string question_of(const TokenText& text, size_t row) {
  return row < text.rows.size() ? text.rows[row] : fmt::format("row {}", row);
}

/// A stretch of text in one line: white space becomes single spaces.
std::string one_line(std::string_view text) {
  std::string out;
  for (char c : text) {
    const bool space = c == ' ' || c == '\n' || c == '\t' || c == '\r';
    if (!space) {
      if (static_cast<unsigned char>(c) >= 0x20) out += c;
    } else if (out.empty() || out.back() != ' ') {
      out += ' ';
    }
  }
  return out;
}

/// A word of a passage, and whether it is (partly) selected.
struct Piece {
  std::string text;
  bool marked;
};

std::vector<Piece> pieces_of(const TokenText& text, const Passage& passage) {
  std::vector<Piece> pieces;
  size_t at = passage.shown.begin;
  if (!begins_part(text, at)) pieces.push_back({"... ", false});
  for (const Span& mark : passage.marked) {
    pieces.push_back({one_line(text.slice({at, mark.begin})), false});
    pieces.push_back({one_line(text.slice(mark)), true});
    at = mark.end;
  }
  pieces.push_back({one_line(text.slice({at, passage.shown.end})), false});
  if (!ends_part(text, passage.shown.end)) pieces.push_back({" ...", false});
  return pieces;
}

/// The passage wrapped to `width` columns. Selected words are marked by style on a terminal, elsewhere by << and >>.
std::string wrapped(const std::vector<Piece>& pieces, size_t width) {
  const bool colours = styled(Style::kMarked, "x") != "x";
  std::string out, line, word;
  size_t columns = 0, word_columns = 0;
  const auto flush_word = [&] {
    if (word.empty()) return;
    if (columns > 0 && columns + 1 + word_columns > width) {
      out += fmt::format("{}{}\n", kIndent, line);
      line.clear();
      columns = 0;
    }
    if (columns > 0) line += ' ', ++columns;
    line += word;
    columns += word_columns;
    word.clear();
    word_columns = 0;
  };
  for (const Piece& piece : pieces) {
    const auto put = [&](std::string_view part) {
      word += piece.marked ? styled(Style::kMarked, part) : std::string(part);
      for (char c : part) word_columns += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
    };
    if (piece.text.empty()) continue;
    std::string text = piece.text;
    if (piece.marked && !colours) text = fmt::format("<<{}>>", text);
    for (size_t at = 0; at < text.size();) {
      const size_t space = std::min(text.find(' ', at), text.size());
      if (space > at) put(std::string_view(text).substr(at, space - at));
      if (space < text.size()) flush_word();
      at = space + 1;
    }
  }
  flush_word();
  return out + std::string(kIndent) + line + "\n";
}

void print_row(const TokenText& text, const Selection& selection, size_t row, size_t top) {
  fmt::print("{}\n", styled(Style::kBold, question_of(text, row)));
  fmt::print("  {} tokens of the text selected, in {} passages{}\n", selection.tokens.size(), selection.passages.size(),
             selection.beyond > 0 ? fmt::format("; {} of this step itself", selection.beyond) : "");
  const size_t width = size_t(std::clamp(terminal_width(), 40, 120)) - kIndent.size();
  for (size_t i = 0; i < std::min(top, selection.passages.size()); ++i) {
    const Passage& p = selection.passages[i];
    const std::string& source = text.sources[p.source].name;
    const std::string facts = fmt::format("  {}{}..{}: {} of {} selected", source.empty() ? "" : source + " ", p.first,
                                          p.last, p.selected, p.length());
    fmt::print("{}\n{}", styled(Style::kDim, facts), wrapped(pieces_of(text, p), width));
  }
  fmt::print("\n");
}

nlohmann::json rows_json(const TokenText& text, const std::vector<Selection>& rows) {
  nlohmann::json out = nlohmann::json::array();
  for (size_t row = 0; row < rows.size(); ++row) {
    nlohmann::json passages = nlohmann::json::array();
    for (const Passage& p : rows[row].passages) {
      passages.push_back({{"source", text.sources[p.source].name},
                          {"first", p.first},
                          {"last", p.last},
                          {"selected", p.selected},
                          {"text", std::string(text.slice(p.shown))}});
    }
    out.push_back({{"row", row},
                   {"asks", question_of(text, row)},
                   {"selected", rows[row].tokens.size()},
                   {"beyond", rows[row].beyond},
                   {"passages", passages}});
  }
  return out;
}

std::vector<Selection> selections_of(const std::string& path, const TokenText& text) {
  const OutFile file = read_out_file(path);
  const TensorView& tokens = file.tensors.topk_tokens;
  if (tokens.empty()) {
    throw Exception(
        {ErrorCode::kRefused, path + ": topk_tokens", "absent", "needs an output file written with --dump all"});
  }
  std::vector<Selection> rows;
  for (int64_t row = 0; row < tokens.shape[0]; ++row) {
    rows.push_back(select_passages(text, {tokens.as<int32_t>() + row * tokens.shape[1], size_t(tokens.shape[1])}));
  }
  return rows;
}

}  // namespace

int inspect_text(const TextOptions& options) {
  const TokenText text = read_token_text(options.tokens);
  const std::vector<Selection> rows = selections_of(options.out, text);
  if (!options.html.empty()) {
    write_file("html", options.html, page_html({std::filesystem::path(options.out).filename().string(), &text, rows}));
  }
  if (options.json) {
    fmt::print("{}\n", rows_json(text, rows).dump(2));
    return 0;
  }
  for (size_t row = 0; row < rows.size(); ++row) print_row(text, rows[row], row, size_t(options.top));
  if (!options.html.empty()) fmt::print("wrote {}\n", options.html);
  return 0;
}

}  // namespace dsacore::cli
