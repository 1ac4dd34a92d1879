#include "cli/text_page.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/text_page_style.h"

namespace dsacore::cli {
namespace {

constexpr size_t kBest = 8;  // passages that are shown at once; the others fold
constexpr size_t kStripBins = 240;
constexpr double kMapHeight = 1000;  // units of the map beside the whole text
constexpr size_t kColours = 6;

std::string colour_of(size_t source) { return fmt::format("--c: var(--s{})", source % kColours); }

std::string name_of_source(const TokenText& text, size_t source) {
  const std::string& name = text.sources[source].name;
  return name.empty() ? "text" : escape_html(name);
}

std::string question_of(const TokenText& text, size_t row) {
  return row < text.rows.size() ? escape_html(text.rows[row]) : fmt::format("Row {}", row);
}

/// "1 passage", "2 passages".
std::string count_of(size_t n, const char* one) { return fmt::format("{} {}{}", n, one, n == 1 ? "" : "s"); }

/// The text of a span, its marked parts in <mark>; `id_of` gives the attributes of each.
template <class IdOf>
std::string marked_html(const TokenText& text, Span span, std::span<const Span> marked, IdOf id_of) {
  std::string html;
  size_t at = span.begin;
  for (const Span& mark : marked) {
    if (mark.begin < span.begin || mark.end > span.end) continue;
    html += escape_html(text.slice({at, mark.begin}));
    html += fmt::format("<mark{}>{}</mark>", id_of(mark), escape_html(text.slice(mark)));
    at = mark.end;
  }
  return html + escape_html(text.slice({at, span.end}));
}

std::string no_id(const Span&) { return {}; }

/// Where along the text the selection lies: bars over the sources' bands.
std::string strip_html(const TokenText& text, const Selection& selection) {
  const double total = double(std::max<size_t>(1, text.text.size()));
  std::vector<size_t> bins(kStripBins);
  for (size_t token : selection.tokens) {
    ++bins[std::min(kStripBins - 1, size_t(double(text.tokens[token].begin) / total * double(kStripBins)))];
  }
  const size_t most = std::max<size_t>(1, *std::max_element(bins.begin(), bins.end()));
  std::string svg =
      "<svg viewBox=\"0 0 1000 58\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"where the selection lies\">";
  std::string names;
  for (size_t s = 0; s < text.sources.size(); ++s) {
    const Span span = text.sources[s].span;
    const double from = double(span.begin) / total, share = double(span.end - span.begin) / total;
    svg += fmt::format(
        "<rect x=\"{:.2f}\" y=\"0\" width=\"{:.2f}\" height=\"58\" fill=\"var(--s{})\" fill-opacity=\".14\"/>",
        from * 1000, std::max(0.0, share * 1000 - 1), s % kColours);
    names += fmt::format("<span style=\"width: {:.2f}%\">{}</span>", share * 100, name_of_source(text, s));
  }
  const double width = 1000.0 / double(kStripBins);
  for (size_t i = 0; i < kStripBins; ++i) {
    if (bins[i] == 0) continue;
    const double height = 4 + 50 * double(bins[i]) / double(most);
    const size_t source = text.source_at(size_t((double(i) + .5) / double(kStripBins) * total));
    svg += fmt::format("<rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" fill=\"var(--s{})\"/>",
                       double(i) * width, 58 - height, width * .84, height, source % kColours);
  }
  return fmt::format("<div class=\"strip\">{}</svg><div>{}</div></div>\n", svg, names);
}

/// A passage's text; the blank lines between its paragraphs become line breaks.
std::string quote_html(const TokenText& text, const Passage& p) {
  std::string html = marked_html(text, p.shown, p.marked, no_id);
  constexpr std::string_view kBlank = "\n\n", kBreak = "<br/>";
  for (size_t at = html.find(kBlank); at != std::string::npos; at = html.find(kBlank, at + kBreak.size())) {
    html.replace(at, kBlank.size(), kBreak);
  }
  const char* before = begins_part(text, p.shown.begin) ? "" : "<i class=\"soft\">&#8230;</i> ";
  const char* after = ends_part(text, p.shown.end) ? "" : " <i class=\"soft\">&#8230;</i>";
  return before + html + after;
}

std::string passage_html(const TokenText& text, const Passage& p, size_t row, size_t number) {
  const std::string tokens =
      p.length() == 1 ? fmt::format("token {}", p.first) : fmt::format("tokens {} to {}", p.first, p.last);
  return fmt::format(
      "<li style=\"{}\"><div class=\"facts\"><b>{}</b><span>{}</span><span><span class=\"meter\"><i style=\"width: "
      "{:.0f}%\"></i></span>"
      "{} of {} selected</span><a href=\"#r{}p{}\">in the text</a></div>\n<div class=\"quote\">{}</div></li>\n",
      colour_of(p.source), name_of_source(text, p.source), tokens, p.density() * 100, p.selected, p.length(), row,
      number, quote_html(text, p));
}

std::string passages_html(const TokenText& text, const Selection& selection, size_t row) {
  std::string html = "<h3>Passages</h3>\n";
  if (selection.passages.empty()) return html + "<p>Nothing of the text was selected.</p>\n";
  std::string best, rest;
  for (size_t i = 0; i < selection.passages.size(); ++i)
    (i < kBest ? best : rest) += passage_html(text, selection.passages[i], row, i);
  html += fmt::format("<ol class=\"passages\">\n{}</ol>\n", best);
  if (!rest.empty()) {
    html += fmt::format(
        "<details><summary>{} more, shorter or thinner</summary>\n<ol class=\"passages\">\n{}</ol></details>\n",
        selection.passages.size() - kBest, rest);
  }
  return html;
}

/// Share of the text's lines before a byte, for each passage: the map stands beside text that is laid out by lines.
class LineMap {
 public:
  explicit LineMap(const TokenText& text) {
    for (size_t i = 0; i < text.text.size(); ++i) {
      if (text.text[i] == '\n') breaks_.push_back(i);
    }
  }
  double place(size_t byte) const {
    const auto before = std::lower_bound(breaks_.begin(), breaks_.end(), byte) - breaks_.begin();
    return double(before) / double(breaks_.size() + 1);
  }

 private:
  std::vector<size_t> breaks_;
};

std::string map_html(const TokenText& text, const Selection& selection, size_t row, const LineMap& lines) {
  std::string svg = fmt::format(
      "<svg viewBox=\"0 0 46 {0}\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"map of the text\">",
      kMapHeight);
  for (size_t s = 0; s < text.sources.size(); ++s) {
    const double from = lines.place(text.sources[s].span.begin) * kMapHeight,
                 to = lines.place(text.sources[s].span.end) * kMapHeight;
    svg += fmt::format("<rect x=\"0\" y=\"{:.1f}\" width=\"5\" height=\"{:.1f}\" fill=\"var(--s{})\"/>", from,
                       std::max(1.0, to - from - 2), s % kColours);
  }
  for (size_t i = 0; i < selection.passages.size(); ++i) {
    const Passage& p = selection.passages[i];
    const double from = lines.place(text.tokens[p.first].begin) * kMapHeight;
    const double height = std::max(3.0, lines.place(text.tokens[p.last].end) * kMapHeight - from);
    // Twice: the visible bar, as wide as the passage is dense, and one that is easy to hit.
    svg += fmt::format(
        "<a href=\"#r{}p{}\"><title>{}, {} tokens</title><rect x=\"8\" y=\"{:.1f}\" width=\"38\" height=\"{:.1f}\" "
        "fill=\"transparent\"/>"
        "<rect x=\"9\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"var(--s{})\"/></a>",
        row, i, name_of_source(text, p.source), p.selected, from - 3, height + 6, from, 8 + 28 * p.density(), height,
        p.source % kColours);
  }
  return svg + "</svg>\n";
}

std::string whole_html(const TokenText& text, const Selection& selection, size_t row, const LineMap& lines) {
  const std::vector<Span> marked = marked_spans(text, selection.tokens);
  const auto id_of = [&](const Span& mark) {
    for (size_t i = 0; i < selection.passages.size(); ++i) {
      if (text.tokens[selection.passages[i].first].begin == mark.begin) return fmt::format(" id=\"r{}p{}\"", row, i);
    }
    return std::string();
  };
  std::string html =
      fmt::format("<h3>The whole text</h3>\n<div class=\"whole\">\n{}<div class=\"scroll\" tabindex=\"0\">\n",
                  map_html(text, selection, row, lines));
  for (size_t s = 0; s < text.sources.size(); ++s) {
    html += fmt::format("<section style=\"{}\"><h4>{}</h4><pre>{}</pre></section>\n", colour_of(s),
                        name_of_source(text, s), marked_html(text, text.sources[s].span, marked, id_of));
  }
  return html + "</div></div>\n";
}

std::string row_html(const TextPage& page, size_t row, const LineMap& lines) {
  const TokenText& text = *page.text;
  const Selection& selection = page.rows[row];
  std::string facts = fmt::format("{} of the text selected, in {}", count_of(selection.tokens.size(), "token"),
                                  count_of(selection.passages.size(), "passage"));
  if (selection.beyond > 0) facts += fmt::format("; and {} of this step itself", count_of(selection.beyond, "token"));
  return fmt::format("<section class=\"row\" id=\"row{}\">\n<h2>{}</h2>\n<p class=\"soft\">{}.</p>\n", row,
                     question_of(text, row), facts) +
         strip_html(text, selection) + passages_html(text, selection, row) + whole_html(text, selection, row, lines) +
         "</section>\n";
}

/// One rule a row: the radio button of the row shows its section and marks its label.
std::string tab_style(size_t rows) {
  std::string css;
  for (size_t row = 0; row < rows; ++row) {
    css += fmt::format(
        "#tab{0}:checked ~ .page #row{0} {{ display: block; }}\n#tab{0}:checked ~ .page label[for=tab{0}] {{ "
        "background: var(--quiet); "
        "border-color: var(--line); font-weight: 600; }}\n#tab{0}:focus-visible ~ .page label[for=tab{0}] {{ outline: "
        "2px solid var(--accent); }}\n",
        row);
  }
  return css;
}

std::string header_html(const TextPage& page) {
  const TokenText& text = *page.text;
  std::string legend = "<span><mark>selected</mark> tokens the indexer chose</span>";
  for (size_t s = 0; s < text.sources.size(); ++s) {
    if (text.sources[s].name.empty()) continue;
    legend +=
        fmt::format("<span><i class=\"swatch\" style=\"{}\"></i>{}</span>", colour_of(s), name_of_source(text, s));
  }
  return fmt::format(
      "<header><h1>What each row selected</h1>\n<p class=\"soft\">{}: {} over a text of {}</p>\n<div "
      "class=\"legend\">{}</div></header>\n",
      escape_html(page.title), count_of(page.rows.size(), "row"), count_of(text.tokens.size(), "token"), legend);
}

}  // namespace

std::string escape_html(std::string_view text) {
  std::string out;
  out.reserve(text.size() + text.size() / 16);
  for (char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default:
        if (static_cast<unsigned char>(c) >= 0x20 || c == '\n' || c == '\t') out += c;
    }
  }
  return out;
}

std::string page_html(const TextPage& page) {
  const LineMap lines(*page.text);
  std::string tabs, labels, rows;
  for (size_t row = 0; row < page.rows.size(); ++row) {
    tabs += fmt::format("<input class=\"tab\" type=\"radio\" name=\"row\" id=\"tab{0}\"{1}/>\n", row,
                        row == 0 ? " checked=\"checked\"" : "");
    labels += fmt::format("<label for=\"tab{}\">{}<small>{}</small></label>\n", row, question_of(*page.text, row),
                          count_of(page.rows[row].passages.size(), "passage"));
    rows += row_html(page, row, lines);
  }
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n<meta name=\"viewport\" "
      "content=\"width=device-width, "
      "initial-scale=1\"/>\n<title>{} - what each row selected</title>\n<style>{}{}</style>\n</head>\n<body>\n{}<div "
      "class=\"page\">\n{}"
      "<nav aria-label=\"rows\">\n{}</nav>\n<main>\n{}</main>\n</div>\n</body>\n</html>\n",
      escape_html(page.title), kPageStyle, tab_style(page.rows.size()), tabs, header_html(page), labels, rows);
}

}  // namespace dsacore::cli
