// A small SVG writer: shapes in one coordinate system, text escaped, numbers short.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace dsacore::cli {

struct SvgPoint {
  double x, y;
};

class Svg {
 public:
  Svg(double width, double height, std::string_view title);

  struct Stroke {
    std::string colour = "#444";
    double width = 1;
    std::string dashes;  ///< e.g. "5 4"
  };
  struct Text {
    double size = 13;
    std::string anchor = "start";  ///< start, middle, end
    std::string colour = "#222";
    bool bold = false;
    bool halo = false;  ///< a white rim, for text over lines
  };

  void rect(double x, double y, double width, double height, std::string_view fill, double opacity = 1,
            const Stroke* outline = nullptr);
  void line(SvgPoint from, SvgPoint to, const Stroke& stroke);
  void polyline(std::span<const SvgPoint> points, const Stroke& stroke);
  void circle(SvgPoint centre, double radius, std::string_view fill);
  void text(double x, double y, std::string_view text, const Text& style);

  /// The whole document.
  std::string document() const { return body_ + "</svg>\n"; }

 private:
  std::string body_;
};

}  // namespace dsacore::cli
