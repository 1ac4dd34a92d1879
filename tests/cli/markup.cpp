#include "cli/markup.h"

#include <array>
#include <cctype>
#include <string_view>
#include <vector>

namespace dsacore::test {
namespace {

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == ':' || c == '_'; }

/// Reads markup from left to right; `problem` is set at the first offence.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  std::string problem;

  void read() {
    if (text_.starts_with("<!DOCTYPE html>")) at_ = 15;
    while (at_ < text_.size() && problem.empty()) {
      if (text_[at_] == '<') {
        read_tag();
      } else if (text_[at_] == '&') {
        read_entity();
      } else {
        ++at_;
      }
    }
    if (problem.empty() && !open_.empty()) fail("<" + open_.back() + "> is never closed");
  }

 private:
  void fail(const std::string& what) {
    if (problem.empty()) problem = what + " at byte " + std::to_string(at_) + ": " + std::string(text_.substr(at_, 60));
  }

  void read_entity() {
    for (std::string_view known : {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;", "&#8230;"}) {
      if (!text_.substr(at_).starts_with(known)) continue;
      at_ += known.size();
      return;
    }
    fail("a bare or unknown entity");
  }

  std::string read_name() {
    const size_t from = at_;
    while (at_ < text_.size() && is_name(text_[at_])) ++at_;
    return std::string(text_.substr(from, at_ - from));
  }

  void read_tag() {
    ++at_;
    if (text_[at_] == '/') return read_end();
    const std::string name = read_name();
    if (name.empty()) return fail("a bare <");
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0) {
      ++at_;
      if (is_name(text_[at_]) && !read_attribute()) return;
    }
    if (text_.substr(at_).starts_with("/>")) {
      at_ += 2;
    } else if (text_[at_] == '>') {
      ++at_;
      open_.push_back(name);
    } else {
      fail("an unfinished tag");
    }
  }

  bool read_attribute() {
    read_name();
    if (!text_.substr(at_).starts_with("=\"")) return fail("an attribute without a quoted value"), false;
    for (at_ += 2; at_ < text_.size() && text_[at_] != '"';) {
      if (text_[at_] == '<') return fail("< in an attribute"), false;
      text_[at_] == '&' ? read_entity() : void(++at_);
      if (!problem.empty()) return false;
    }
    ++at_;
    return true;
  }

  void read_end() {
    ++at_;
    const std::string name = read_name();
    if (open_.empty() || open_.back() != name) return fail("</" + name + "> closes nothing that is open");
    if (text_[at_] != '>') return fail("an unfinished end tag");
    ++at_;
    open_.pop_back();
  }

  std::string_view text_;
  size_t at_ = 0;
  std::vector<std::string> open_;
};

}  // namespace

::testing::AssertionResult well_formed(const std::string& markup) {
  Reader reader(markup);
  reader.read();
  if (reader.problem.empty()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << reader.problem;
}

}  // namespace dsacore::test
