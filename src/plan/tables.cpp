#include "plan/tables.h"

#include <nlohmann/json.hpp>

#include "dsacore/formats.h"
#include "dsacore/problem.h"
#include "dsacore/status.h"

namespace dsacore {
namespace {

using nlohmann::json;

[[noreturn]] void malformed(std::string_view source, const std::string& key, std::string value, std::string allowed) {
  throw Exception({ErrorCode::kMalformedFile, std::string(source) + ": " + key, std::move(value), std::move(allowed)});
}

/// Whether `pattern` ("*" or the name itself) fits.
bool fits(const json& entry, const char* key, std::string_view name) {
  const std::string pattern = entry.value(key, std::string("*"));
  return pattern == "*" || pattern == name;
}

void check_names(std::string_view argument, const RowTable& table, bool (*known)(std::string_view),
                 const char* allowed) {
  for (std::string_view name : table.names()) {
    if (!known(name)) throw Exception({ErrorCode::kRefused, std::string(argument), std::string(name), allowed});
  }
}

void check_overlap(std::string_view argument, const RowTable& table) {
  check_names(
      argument, table, [](std::string_view n) { return overlap_mode_of(n).has_value(); },
      "allowed: serial, wait, fork, front, late, late_front");
}

int stage_index(std::string_view name) {
  for (int i = 0; i < kStages; ++i) {
    if (kStageNames[size_t(i)] == name) return i;
  }
  return -1;
}

Tables tables_of(const json& entry, std::string_view source) {
  Tables tables;
  tables.source = source;
  if (entry.contains("kernels")) {
    for (const auto& [stage, table] : entry["kernels"].items()) {
      const int at = stage_index(stage);
      if (at < 0) malformed(source, "kernels", stage, "not a stage");
      tables.kernels[size_t(at)] =
          RowTable::parse(std::string(source) + ": kernels." + stage, table.get<std::string>());
    }
  }
  const json indexers = entry.value("indexers", json::object());
  for (const auto& [name, by_q] : indexers.items()) {
    const std::optional<IndexFormat> format = index_format_of(name);
    if (!format) malformed(source, "indexers", name, "allowed: fp8, mxfp4");
    for (const auto& [q, table] : by_q.items()) {
      if (q.size() != 1 || q[0] < '1' || q[0] > '8') malformed(source, "indexers." + name, q, "a q of 1..8");
      std::string argument(source);
      argument.append(": indexers.").append(name).append(".").append(q);
      tables.indexers[{*format, q[0] - '0'}] = RowTable::parse(argument, table.get<std::string>());
    }
  }
  tables.overlap = RowTable::parse(std::string(source) + ": overlap", entry.value("overlap", std::string("serial")));
  check_overlap(std::string(source) + ": overlap", tables.overlap);
  tables.unfused_overlap =
      RowTable::parse(std::string(source) + ": unfused_overlap", entry.value("unfused_overlap", std::string("serial")));
  check_overlap(std::string(source) + ": unfused_overlap", tables.unfused_overlap);
  tables.partial = RowTable::parse(std::string(source) + ": partial", entry.value("partial", std::string("bf16")));
  check_names(
      std::string(source) + ": partial", tables.partial, [](std::string_view n) { return n == "bf16" || n == "proj"; },
      "allowed: bf16, proj");
  return tables;
}

OverlapMode mode_of(const RowTable& table, int rows) {
  return overlap_mode_of(table.find(rows).value_or("serial")).value_or(OverlapMode::kSerial);
}

}  // namespace

std::string_view Tables::kernel_of(StageId stage, IndexFormat index_format, int q, int rows) const {
  if (const auto at = indexers.find({index_format, q}); stage == StageId::kIndexer && at != indexers.end()) {
    if (const auto name = at->second.find(rows)) return *name;
  }
  return kernels[static_cast<size_t>(stage)].find(rows).value_or("auto");
}
OverlapMode Tables::overlap_of(int rows) const { return mode_of(overlap, rows); }
OverlapMode Tables::unfused_overlap_of(int rows) const { return mode_of(unfused_overlap, rows); }

Tables read_tables(std::string_view text, std::string_view source, std::string_view backend, std::string_view target,
                   int heads) {
  try {
    const json root = json::parse(text);
    if (root.value("version", 0) != 1) malformed(source, "version", root.value("version", json()).dump(), "allowed: 1");
    for (const json& entry : root.at("tables")) {
      const bool few_enough = heads <= entry.value("max_heads", kMaxHeads * kMaxRanks);
      if (fits(entry, "backend", backend) && fits(entry, "target", target) && few_enough)
        return tables_of(entry, source);
    }
  } catch (const json::exception& e) {
    malformed(source, "JSON", e.what(), "must be a tables file, see docs/tables.md");
  }
  Tables none;
  none.source = source;
  none.overlap = RowTable::parse("overlap", "serial");
  none.partial = RowTable::parse("partial", "bf16");
  return none;
}

void override_tables(Tables& tables, std::string_view kernels, std::string_view overlap) {
  while (!kernels.empty()) {
    const size_t end = kernels.find(';');
    const std::string_view part = kernels.substr(0, end);
    kernels = end == std::string_view::npos ? std::string_view() : kernels.substr(end + 1);
    const size_t equals = part.find('=');
    const int at = equals == std::string_view::npos ? -1 : stage_index(part.substr(0, equals));
    if (at < 0) {
      throw Exception({ErrorCode::kRefused, "kernels", std::string(part), "must read `stage=rows:name,...;stage=...`"});
    }
    tables.kernels[size_t(at)] =
        RowTable::parse("kernels." + std::string(part.substr(0, equals)), part.substr(equals + 1));
    if (StageId(at) == StageId::kIndexer) tables.indexers.clear();
  }
  if (!overlap.empty()) {
    tables.overlap = RowTable::parse("overlap", overlap);
    check_overlap("overlap", tables.overlap);
  }
}

}  // namespace dsacore
