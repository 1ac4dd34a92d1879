#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/inspect.h"
#include "cli/terminal.h"
#include "driver/plan_report.h"

namespace dsacore::cli {
namespace {

nlohmann::ordered_json plan_json(const ProblemShape& shape, const RunOptions& options, const PlanReport& plan) {
  nlohmann::ordered_json stages = nlohmann::ordered_json::array(), reserved = nlohmann::ordered_json::array();
  for (const PlanReport::Stage& stage : plan.stages) {
    nlohmann::ordered_json others = nlohmann::ordered_json::array();
    for (const PlanReport::PassedOver& other : stage.others)
      others.push_back({{"kernel", other.kernel}, {"why_not", other.reason}});
    stages.push_back({{"stage", stage.name}, {"kernel", stage.kernel}, {"others", others}});
  }
  for (const ReservedItem& item : plan.reserved) reserved.push_back({{"name", item.name}, {"bytes", item.bytes}});
  nlohmann::ordered_json out = {{"shape", shape.text()},
                                {"backend", name_of(options.backend)},
                                {"target", plan.target},
                                {"threads", plan.threads},
                                {"tables", plan.tables},
                                {"plan_rows", plan.rows},
                                {"overlap", plan.overlap},
                                {"stages", stages},
                                {"reserved_bytes", plan.reserved_bytes},
                                {"reserved", reserved}};
  if (!plan.partial.empty()) out["partial"] = plan.partial;
  return out;
}

}  // namespace

int inspect_plan(const std::string& text, const RunOptions& options, bool json) {
  const ProblemShape shape = parse_shape(text);
  const PlanReport plan = plan_report(shape, options);
  if (json) {
    fmt::print("{}\n", plan_json(shape, options, plan).dump(2));
    return 0;
  }
  fmt::print("{}\n{} on {}, {} threads a rank, tables: {}\n\n", shape.text(), name_of(options.backend), plan.target,
             plan.threads, plan.tables);
  Table stages({{"stage", false}, {"kernel", false}, {"why not the others", false}});
  for (const PlanReport::Stage& stage : plan.stages) {
    if (stage.others.empty()) stages.add({stage.name, styled(Style::kBold, stage.kernel), "there is no other"});
    for (size_t i = 0; i < stage.others.size(); ++i) {
      const PlanReport::PassedOver& other = stage.others[i];
      stages.add({i == 0 ? stage.name : "", i == 0 ? styled(Style::kBold, stage.kernel) : "",
                  other.kernel + ": " + other.reason});
    }
  }
  fmt::print("{}\nplan for {} rows, overlap {}{}\n\n", stages.text(), plan.rows, plan.overlap,
             plan.partial.empty() ? "" : ", partial results as " + plan.partial);
  Table reserved({{"reserved", false}, {"bytes", true}});
  for (const ReservedItem& item : plan.reserved) {
    if (item.bytes > 0) reserved.add({item.name, bytes_text(double(item.bytes))});
  }
  reserved.add({"in all", bytes_text(double(plan.reserved_bytes))});
  fmt::print("{}", reserved.text());
  return 0;
}

}  // namespace dsacore::cli
