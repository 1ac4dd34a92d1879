#include "plan/tables_file.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace dsacore {
namespace {

using nlohmann::ordered_json;

ordered_json entry_json(const TablesEntry& entry) {
  ordered_json out = {{"backend", entry.backend}};
  if (!entry.target.empty()) out["target"] = entry.target;
  if (entry.max_heads > 0) out["max_heads"] = entry.max_heads;
  ordered_json kernels = ordered_json::object();
  for (int i = 0; i < kStages; ++i) {
    const std::string& text = entry.tables.kernels[size_t(i)].text();
    if (!text.empty()) kernels[std::string(kStageNames[size_t(i)])] = text;
  }
  out["kernels"] = kernels;
  for (const auto& [key, table] : entry.tables.indexers) {
    out["indexers"][std::string(name_of(key.first))][std::to_string(key.second)] = table.text();
  }
  out["overlap"] = entry.tables.overlap.text();
  out["unfused_overlap"] = entry.tables.unfused_overlap.text();
  out["partial"] = entry.tables.partial.text();
  return out;
}

}  // namespace

std::string tables_text(const std::vector<TablesEntry>& entries, const TablesOrigin& origin, std::string_view others) {
  std::vector<ordered_json> lines;
  lines.reserve(entries.size());
  for (const TablesEntry& entry : entries) lines.push_back(entry_json(entry));
  const ordered_json rest = ordered_json::parse(others);
  for (const ordered_json& other : rest.at("tables")) {
    const bool replaced = std::any_of(entries.begin(), entries.end(), [&](const TablesEntry& entry) {
      return other.value("backend", "*") == entry.backend &&
             (entry.target.empty() || other.value("target", "*") == entry.target);
    });
    if (!replaced) lines.push_back(other);
  }
  std::string text =
      "{\n  \"version\": 1,\n  \"measured\": " +
      ordered_json(
          {{"device", origin.device}, {"date", origin.date}, {"program", origin.program}, {"shapes", origin.measured}})
          .dump() +
      ",\n  \"tables\": [\n";
  for (size_t i = 0; i < lines.size(); ++i) text += "    " + lines[i].dump() + (i + 1 < lines.size() ? ",\n" : "\n");
  return text + "  ]\n}\n";
}

}  // namespace dsacore
