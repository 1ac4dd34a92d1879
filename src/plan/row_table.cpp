#include "plan/row_table.h"

#include <charconv>

#include "dsacore/problem.h"
#include "dsacore/status.h"

namespace dsacore {
namespace {

std::optional<int> number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t at = 0;;) {
    const size_t end = text.find(separator, at);
    parts.push_back(text.substr(at, end == std::string_view::npos ? end : end - at));
    if (end == std::string_view::npos) return parts;
    at = end + 1;
  }
}

RowTable RowTable::parse(std::string_view argument, std::string_view text) {
  const auto refuse = [&](const std::string& why) {
    throw Exception({ErrorCode::kRefused, std::string(argument), std::string(text),
                     why + "; a table reads `1-4:name,5-64:name`, or `name`, rows 1..256"});
  };
  RowTable table;
  table.text_ = text;
  if (text.empty()) return table;
  const bool names_rows = text.front() >= '0' && text.front() <= '9';
  if (!names_rows && text.find(':') == std::string_view::npos && text.find(',') == std::string_view::npos) {
    table.entries_.push_back({1, kMaxRows, std::string(text)});
    return table;
  }
  for (std::string_view part : split(text, ',')) {
    const size_t colon = part.find(':');
    if (colon == std::string_view::npos || colon + 1 == part.size()) refuse("`" + std::string(part) + "` has no name");
    const std::vector<std::string_view> ends = split(part.substr(0, colon), '-');
    const std::optional<int> first = number(ends.front());
    const std::optional<int> last = number(ends.back());
    if (ends.size() > 2 || !first || !last || *first < 1 || *last < *first || *last > kMaxRows) {
      refuse("`" + std::string(part) + "` has no range of rows");
    }
    for (const Entry& e : table.entries_) {
      if (*first <= e.last && e.first <= *last) refuse("`" + std::string(part) + "` overlaps an earlier range");
    }
    table.entries_.push_back({*first, *last, std::string(part.substr(colon + 1))});
  }
  return table;
}

RowTable RowTable::of(const std::vector<std::string>& names) {
  std::string text;
  for (size_t first = 0; first < names.size();) {
    size_t end = first;
    while (end < names.size() && names[end] == names[first]) ++end;
    if (!names[first].empty()) {
      text += (text.empty() ? "" : ",") + std::to_string(first + 1) + "-" + std::to_string(end) + ":" + names[first];
    }
    first = end;
  }
  return parse("rows", text);
}

std::optional<std::string_view> RowTable::find(int rows) const {
  for (const Entry& e : entries_) {
    if (e.first <= rows && rows <= e.last) return e.name;
  }
  return std::nullopt;
}

std::vector<std::string_view> RowTable::names() const {
  std::vector<std::string_view> names;
  names.reserve(entries_.size());
  for (const Entry& e : entries_) names.push_back(e.name);
  return names;
}

}  // namespace dsacore
