// What a DCP run's output must be against one rank's (spec 9).
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/layer.h"

namespace dsacore {

inline constexpr double kOutBound = 8e-3;  // spec 9; a single row may be 4 times as far

/// Requires `got` to be within spec 9's bound of `expected` over all rows and 4 times the bound in each; both [rows,
/// width].
inline void expect_out(const std::vector<uint16_t>& got, const std::vector<uint16_t>& expected, size_t rows,
                       const std::string& where) {
  ASSERT_EQ(got.size(), expected.size()) << where;
  const size_t width = expected.size() / rows;
  EXPECT_LT(test::relative_error(got, expected), kOutBound) << where;
  for (size_t b = 0; b < rows; ++b) {
    const auto row = [&](const std::vector<uint16_t>& from) {
      return std::vector<uint16_t>(from.begin() + ptrdiff_t(b * width), from.begin() + ptrdiff_t((b + 1) * width));
    };
    EXPECT_LT(test::relative_error(row(got), row(expected)), 4 * kOutBound) << where << " row " << b;
  }
}

}  // namespace dsacore
