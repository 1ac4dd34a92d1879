// RowTable: which name holds for which number of rows, written `1-4:fused,5-64:split` or just `fused` (layer.md 2).
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dsacore {

/// The parts of a text between separators, empty ones too.
std::vector<std::string_view> split(std::string_view text, char separator);

class RowTable {
 public:
  RowTable() = default;

  /// Throws `kRefused` naming `argument` where the text is malformed, ranges overlap or leave 1..256.
  static RowTable parse(std::string_view argument, std::string_view text);

  /// The table that gives `names[rows - 1]` for 1..256 rows; an empty name: it says nothing.
  static RowTable of(const std::vector<std::string>& names);

  /// The name for a number of rows, or nullopt where the table says nothing.
  std::optional<std::string_view> find(int rows) const;
  const std::string& text() const { return text_; }
  /// The names in the table, in order.
  std::vector<std::string_view> names() const;

 private:
  struct Entry {
    int first, last;
    std::string name;
  };
  std::vector<Entry> entries_;
  std::string text_;
};

}  // namespace dsacore
