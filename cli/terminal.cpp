#include "terminal.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>

namespace dsacore::cli {
namespace {

using namespace std::chrono_literals;

constexpr auto kQuietFor = 1s;  // shorter work shows nothing
constexpr auto kRedraw = 100ms;
constexpr int kBarWidth = 28;

const char* code_of(Style style) {
  switch (style) {
    case Style::kBold: return "\x1b[1m";
    case Style::kDim: return "\x1b[2m";
    case Style::kRed: return "\x1b[31m";
    case Style::kGreen: return "\x1b[32m";
    case Style::kMarked: return "\x1b[1;33m";
  }
  return "";
}

/// Columns that a text fills: its bytes but for UTF-8 continuations and escape sequences.
size_t width_of(std::string_view text) {
  size_t width = 0;
  bool escape = false;
  for (char c : text) {
    if (c == '\x1b') escape = true;
    if (!escape && (static_cast<unsigned char>(c) & 0xC0) != 0x80) ++width;
    if (escape && c == 'm') escape = false;
  }
  return width;
}

}  // namespace

bool is_terminal(std::FILE* stream) { return isatty(fileno(stream)) == 1; }

int terminal_width() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 20) return size.ws_col;
  return 100;
}

std::string styled(Style style, std::string_view text) {
  static const bool colours = is_terminal(stdout) && std::getenv("NO_COLOR") == nullptr;
  return colours ? fmt::format("{}{}\x1b[0m", code_of(style), text) : std::string(text);
}

std::string bytes_text(double bytes) {
  static constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < kUnits.size()) bytes /= 1024, ++unit;
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

std::string seconds_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

std::string Table::text() const {
  std::vector<size_t> widths;
  widths.reserve(columns_.size());
  for (const Column& column : columns_) widths.push_back(width_of(column.title));
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width_of(row[i]));
  }
  std::string out;
  const auto line = [&](const auto& cell_of, auto style) {
    std::string text;
    for (size_t i = 0; i < columns_.size(); ++i) {
      const std::string cell = cell_of(i);
      const std::string pad(widths[i] - width_of(cell), ' ');
      if (i > 0) text += "  ";
      text += columns_[i].right ? pad + cell : cell + pad;
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out += style(text) + "\n";
  };
  const bool titled =
      std::any_of(columns_.begin(), columns_.end(), [](const Column& column) { return !column.title.empty(); });
  if (titled) {
    line([&](size_t i) { return columns_[i].title; },
         [](const std::string& text) { return styled(Style::kDim, text); });
  }
  for (const auto& row : rows_) {
    line([&](size_t i) { return i < row.size() ? row[i] : std::string(); },
         [](const std::string& text) { return text; });
  }
  return out;
}

Progress::Progress(std::string what, int64_t steps) : what_(std::move(what)), steps_(steps) {
  if (is_terminal(stderr)) painter_ = std::thread([this] { draw_loop(); });
}

Progress::~Progress() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  ended_changed_.notify_all();
  if (painter_.joinable()) painter_.join();
}

void Progress::set_what(std::string what) {
  const std::lock_guard lock(mutex_);
  what_ = std::move(what);
}

void Progress::draw_loop() {
  const auto start = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  if (ended_changed_.wait_for(lock, kQuietFor, [this] { return ended_; })) return;
  while (!ended_) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::string line = fmt::format("\r\x1b[K{}", what_);
    if (steps_ > 0) {
      const double share = std::clamp(double(done_.load()) / double(steps_), 0.0, 1.0);
      const int full = int(std::lround(share * kBarWidth));
      line += fmt::format("  [{}{}] {:3.0f} %", std::string(size_t(full), '='),
                          std::string(size_t(kBarWidth - full), ' '), share * 100);
    }
    line += fmt::format("  {:.0f} s", seconds);
    std::fwrite(line.data(), 1, line.size(), stderr);
    std::fflush(stderr);
    ended_changed_.wait_for(lock, kRedraw, [this] { return ended_; });
  }
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
}

}  // namespace dsacore::cli
