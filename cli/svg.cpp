#include "cli/svg.h"

#include <fmt/format.h>

#include "cli/text_page.h"

namespace dsacore::cli {
namespace {

std::string stroke_text(const Svg::Stroke& stroke) {
  const std::string dashes = stroke.dashes.empty() ? "" : fmt::format(" stroke-dasharray=\"{}\"", stroke.dashes);
  return fmt::format("stroke=\"{}\" stroke-width=\"{:.4g}\"{}", stroke.colour, stroke.width, dashes);
}

}  // namespace

Svg::Svg(double width, double height, std::string_view title) {
  body_ = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "font-family=\"system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif\">\n<title>{2}</title>\n"
      "<rect width=\"{0:.0f}\" height=\"{1:.0f}\" fill=\"#ffffff\"/>\n",
      width, height, escape_html(title));
}

void Svg::rect(double x, double y, double width, double height, std::string_view fill, double opacity,
               const Stroke* outline) {
  body_ += fmt::format("<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"{}\"{}{}/>\n", x, y,
                       width, height, fill, opacity < 1 ? fmt::format(" fill-opacity=\"{:.3g}\"", opacity) : "",
                       outline != nullptr ? fmt::format(" {}", stroke_text(*outline)) : "");
}

void Svg::line(SvgPoint from, SvgPoint to, const Stroke& stroke) {
  body_ += fmt::format("<line x1=\"{:.2f}\" y1=\"{:.2f}\" x2=\"{:.2f}\" y2=\"{:.2f}\" {}/>\n", from.x, from.y, to.x,
                       to.y, stroke_text(stroke));
}

void Svg::polyline(std::span<const SvgPoint> points, const Stroke& stroke) {
  std::string list;
  for (const SvgPoint& p : points) list += fmt::format("{}{:.2f},{:.2f}", list.empty() ? "" : " ", p.x, p.y);
  body_ +=
      fmt::format("<polyline points=\"{}\" fill=\"none\" stroke-linejoin=\"round\" {}/>\n", list, stroke_text(stroke));
}

void Svg::circle(SvgPoint centre, double radius, std::string_view fill) {
  body_ +=
      fmt::format("<circle cx=\"{:.2f}\" cy=\"{:.2f}\" r=\"{:.4g}\" fill=\"{}\"/>\n", centre.x, centre.y, radius, fill);
}

void Svg::text(double x, double y, std::string_view text, const Text& style) {
  const char* halo =
      style.halo ? " stroke=\"#ffffff\" stroke-width=\"4\" stroke-linejoin=\"round\" paint-order=\"stroke\"" : "";
  body_ += fmt::format(
      "<text x=\"{:.2f}\" y=\"{:.2f}\" font-size=\"{:.4g}\" text-anchor=\"{}\" fill=\"{}\"{}{}>{}</text>\n", x, y,
      style.size, style.anchor, style.colour, style.bold ? " font-weight=\"600\"" : "", halo, escape_html(text));
}

}  // namespace dsacore::cli
