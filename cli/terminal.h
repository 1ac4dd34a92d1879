// What the commands share on a terminal: colours where there is one, tables, numbers with units, progress of long work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace dsacore::cli {

bool is_terminal(std::FILE* stream);
/// Columns of the terminal, 100 where there is none.
int terminal_width();

enum class Style { kBold, kDim, kRed, kGreen, kMarked };
/// `text` in a style where standard output is a terminal and NO_COLOR is not set, else as it is.
std::string styled(Style style, std::string_view text);

/// "12.3 MiB".
std::string bytes_text(double bytes);
/// "1.23 ms".
std::string seconds_text(double seconds);

/// A table of text columns, a line of titles first where there are any.
class Table {
 public:
  struct Column {
    std::string title;
    bool right = false;
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string text() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

/// A line on standard error, where that is a terminal, for work that takes over a second: what is done, how far, how
/// long.
class Progress {
 public:
  /// `steps` 0: not known, shows only the time.
  Progress(std::string what, int64_t steps);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance(int64_t steps = 1) { done_ += steps; }
  void set_what(std::string what);

 private:
  void draw_loop();

  std::mutex mutex_;
  std::condition_variable ended_changed_;
  bool ended_ = false;
  std::string what_;
  int64_t steps_;
  std::atomic<int64_t> done_ = 0;
  std::thread painter_;
};

}  // namespace dsacore::cli
