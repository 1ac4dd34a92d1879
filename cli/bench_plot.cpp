#include "cli/bench_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "cli/svg.h"
#include "cli/terminal.h"

namespace dsacore::cli {
namespace {

constexpr double kWidth = 1180, kHeight = 600;
constexpr std::array<const char*, 6> kColours = {"#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377"};
constexpr const char* kInk = "#222222";
constexpr const char* kSoft = "#5c6775";
constexpr const char* kGrid = "#e3e6ea";

/// A rectangle of the picture that holds one plot.
struct Panel {
  double left, top, right, bottom;
  double width() const { return right - left; }
  double height() const { return bottom - top; }
};

constexpr Panel kStacks = {70, 150, 570, 520};
constexpr Panel kCurves = {690, 150, 1150, 520};

const char* colour_of(size_t stage) { return kColours[stage % kColours.size()]; }

/// Maps log values onto an interval of the picture.
class LogScale {
 public:
  LogScale(double low, double high, double from, double to)
      : low_(std::log10(low)), high_(std::log10(high)), from_(from), to_(to) {}
  double operator()(double value) const { return from_ + (std::log10(value) - low_) / (high_ - low_) * (to_ - from_); }
  double low() const { return low_; }
  double high() const { return high_; }

 private:
  double low_, high_, from_, to_;
};

void draw_legend(Svg& svg, const BenchPoint& point) {
  double x = kStacks.left;
  for (size_t s = 0; s < point.stages.size(); ++s) {
    svg.rect(x, 88, 14, 14, colour_of(s));
    svg.text(x + 20, 100, point.stages[s].name, {.size = 14});
    x += 52 + 7.3 * double(point.stages[s].name.size());
  }
  const Svg::Stroke outline{"#555555", 1, ""};
  svg.rect(x, 88, 14, 14, "#999999", 0.28, &outline);
  svg.text(x + 20, 100, "the stage's floor", {.size = 14});
}

/// One bar of stages from the bottom up; `seconds` gives each stage's height.
template <class Seconds>
void draw_stack(Svg& svg, const BenchPoint& point, double x, double width, double per_second, bool outlined,
                Seconds seconds) {
  double y = kStacks.bottom;
  for (size_t s = 0; s < point.stages.size(); ++s) {
    const double height = seconds(point.stages[s]) * per_second;
    const Svg::Stroke outline{colour_of(s), 1.2, ""};
    y -= height;
    svg.rect(x, y, width, height, colour_of(s), outlined ? 0.28 : 1, outlined ? &outline : nullptr);
  }
}

/// What 100 % is drawn as: the whole height, or less where a floor is higher than its time (work that stays in the
/// caches), or the stages' times (stages that overlap).
double highest_share(const BenchPlot& plot) {
  double highest = 1;
  for (const BenchPoint& point : plot.points) {
    double stages = 0;
    for (const BenchStage& stage : point.stages) stages += stage.median();
    highest = std::max({highest, point.floor / point.layer.median(), stages / point.layer.median()});
  }
  return 1.04 * highest;
}

void draw_stacks(Svg& svg, const BenchPlot& plot) {
  svg.text(kStacks.left, kStacks.top - 22, "Where the time goes: share of the median step", {.size = 15, .bold = true});
  const double most = highest_share(plot);
  const int grid = most < 1.7 ? 20 : most < 4 ? 50 : 100 * int(std::ceil(most / 8));
  for (int percent = 0; percent / 100.0 <= most; percent += grid) {
    const double y = kStacks.bottom - percent / 100.0 / most * kStacks.height();
    svg.line({kStacks.left, y}, {kStacks.right, y}, {kGrid, 1, ""});
    svg.text(kStacks.left - 8, y + 4.5, fmt::format("{} %", percent), {.size = 13, .anchor = "end", .colour = kSoft});
  }
  const double slot = kStacks.width() / double(plot.points.size()), bar = std::min(46.0, slot * 0.34);
  for (size_t i = 0; i < plot.points.size(); ++i) {
    const BenchPoint& point = plot.points[i];
    const double middle = kStacks.left + (double(i) + .5) * slot,
                 per_second = kStacks.height() / most / point.layer.median();
    draw_stack(svg, point, middle - bar - 2, bar, per_second, false, [](const BenchStage& s) { return s.median(); });
    draw_stack(svg, point, middle + 2, bar, per_second, true,
               [&](const BenchStage& s) { return floor_seconds(s.work, plot.peaks); });
    svg.text(middle, kStacks.bottom + 22, point.shape.context, {.size = 13.5, .anchor = "middle"});
    svg.text(middle, kStacks.bottom + 40, seconds_text(point.layer.median()),
             {.size = 13.5, .anchor = "middle", .bold = true});
    svg.text(middle, kStacks.bottom + 57, fmt::format("floor {:.0f} %", 100 * point.floor / point.layer.median()),
             {.size = 12.5, .anchor = "middle", .colour = kSoft});
  }
  svg.line({kStacks.left, kStacks.bottom}, {kStacks.right, kStacks.bottom}, {kInk, 1.2, ""});
  svg.text(kStacks.left - 8, kStacks.bottom + 22, "context", {.size = 12.5, .anchor = "end", .colour = kSoft});
  svg.text(kStacks.left - 8, kStacks.bottom + 40, "step", {.size = 12.5, .anchor = "end", .colour = kSoft});
}

/// "1 us", "10 ms".
std::string decade_text(int exponent) { return seconds_text(std::pow(10.0, exponent)); }

std::vector<double> contexts_of(const BenchPlot& plot) {
  std::vector<double> contexts;
  contexts.reserve(plot.points.size());
  for (const BenchPoint& point : plot.points) contexts.push_back(std::max(1.0, std::atof(point.shape.context.c_str())));
  return contexts;
}

void draw_axes(Svg& svg, const LogScale& x, const LogScale& y, const std::vector<double>& contexts) {
  for (int e = int(std::ceil(y.low())); e <= int(std::floor(y.high())); ++e) {
    const double at = y(std::pow(10.0, e));
    svg.line({kCurves.left, at}, {kCurves.right, at}, {kGrid, 1, ""});
    // "1.00 ms" is exact here, so the digits after the point say nothing.
    std::string label = decade_text(e);
    if (const size_t dot = label.find('.'); dot != std::string::npos) label.erase(dot, label.find(' ') - dot);
    svg.text(kCurves.left - 8, at + 4.5, label, {.size = 13, .anchor = "end", .colour = kSoft});
  }
  double last = -1e9;
  for (double context : contexts) {
    const double at = x(context);
    svg.line({at, kCurves.top}, {at, kCurves.bottom}, {kGrid, 1, ""});
    if (at - last < 52) continue;
    svg.text(at, kCurves.bottom + 22, fmt::format("{:.0f}", context), {.size = 13, .anchor = "middle"});
    last = at;
  }
  svg.line({kCurves.left, kCurves.bottom}, {kCurves.right, kCurves.bottom}, {kInk, 1.2, ""});
  svg.line({kCurves.left, kCurves.top}, {kCurves.left, kCurves.bottom}, {kInk, 1.2, ""});
  svg.text((kCurves.left + kCurves.right) / 2, kCurves.bottom + 44, "context, tokens (log)",
           {.size = 13, .anchor = "middle", .colour = kSoft});
}

void draw_curve(Svg& svg, const std::vector<SvgPoint>& points, const Svg::Stroke& stroke, bool dots) {
  svg.polyline(points, stroke);
  if (!dots) return;
  for (const SvgPoint& p : points) svg.circle(p, stroke.width + 1.6, stroke.colour);
}

void draw_curves(Svg& svg, const BenchPlot& plot) {
  svg.text(kCurves.left, kCurves.top - 22, "Median time against context", {.size = 15, .bold = true});
  const std::vector<double> contexts = contexts_of(plot);
  double low = 1e9, high = 0;
  for (const BenchPoint& point : plot.points) {
    high = std::max({high, point.layer.median(), point.floor});
    for (const BenchStage& stage : point.stages) low = std::min(low, std::max(1e-7, stage.median()));
    if (point.floor > 0) low = std::min(low, point.floor);
  }
  const auto [least, most] = std::minmax_element(contexts.begin(), contexts.end());
  const LogScale x(*least / 1.25, *most * 1.25, kCurves.left, kCurves.right);
  const LogScale y(std::pow(10.0, std::floor(std::log10(low))), high * 1.6, kCurves.bottom, kCurves.top);
  draw_axes(svg, x, y, contexts);
  const auto curve = [&](auto seconds) {
    std::vector<SvgPoint> points;
    for (size_t i = 0; i < plot.points.size(); ++i)
      points.push_back({x(contexts[i]), y(std::max(1e-7, seconds(plot.points[i])))});
    return points;
  };
  for (size_t s = 0; s < plot.points[0].stages.size(); ++s) {
    draw_curve(svg, curve([&](const BenchPoint& p) { return s < p.stages.size() ? p.stages[s].median() : 0; }),
               {colour_of(s), 1.8, ""}, true);
  }
  if (plot.points[0].floor > 0) {
    const auto floors = curve([](const BenchPoint& p) { return p.floor; });
    draw_curve(svg, floors, {"#555555", 1.8, "6 5"}, false);
    svg.text(floors.back().x - 4, floors.back().y + 18, "floor",
             {.size = 13, .anchor = "end", .colour = "#555555", .halo = true});
  }
  const auto layer = curve([](const BenchPoint& p) { return p.layer.median(); });
  draw_curve(svg, layer, {kInk, 2.6, ""}, true);
  svg.text(layer.front().x + 2, layer.front().y - 12, "whole layer", {.size = 13, .bold = true, .halo = true});
}

}  // namespace

std::string bench_svg(const BenchPlot& plot) {
  Svg svg(kWidth, kHeight, plot.title);
  svg.text(24, 38, plot.title, {.size = 20, .bold = true});
  svg.text(24, 62, plot.subtitle, {.size = 13.5, .colour = kSoft});
  if (plot.points.empty()) return svg.document();
  draw_legend(svg, plot.points[0]);
  draw_stacks(svg, plot);
  draw_curves(svg, plot);
  return svg.document();
}

}  // namespace dsacore::cli
