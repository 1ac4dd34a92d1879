// Bf16Ops of every cpu target that this machine runs, against FP64 and against src/format: sums within an error that
// the number of terms explains, nothing written or read outside, elements independent of their neighbours bit for bit,
// NaN kept to its row.
#include "backends/cpu/bf16_ops.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "backends/cpu/bf16_ops_avx512.h"
#include "backends/cpu/cpu_features.h"
#include "cpu/guarded.h"
#include "format/numeric.h"
#include "plan/registry.h"

namespace dsacore {
namespace {

using cpu::BlockDot;
using cpu::RowsDot;

using Random = std::mt19937;

/// Of either sign, exponents from `low` to `high`.
BFloat16 any_bf16(Random& random, int low = -3, int high = 0) {
  const uint32_t bits = uint32_t(random());
  const uint32_t exponent = uint32_t(127 + low) + (bits >> 16) % uint32_t(high - low + 1);
  return {uint16_t((bits & 0x8000u) | exponent << 7 | (bits & 0x7Fu))};
}

/// A matrix [rows, columns], pitch apart, with poison between its rows.
struct Matrix {
  Matrix(int rows_, int columns_, int64_t pitch_, Random& random)
      : rows(rows_), columns(columns_), pitch(pitch_), storage((rows_ - 1) * pitch_ + columns_) {
    for (int r = 0; r < rows; ++r) {
      for (int i = 0; i < columns; ++i) at(r, i) = any_bf16(random);
    }
  }
  BFloat16& at(int64_t r, int64_t i) const { return storage[r * pitch + i]; }
  std::vector<double> row(int r) const {
    std::vector<double> values(static_cast<size_t>(columns));
    for (int i = 0; i < columns; ++i) values[size_t(i)] = to_float(at(r, i));
    return values;
  }

  int rows, columns;
  int64_t pitch;
  Guarded<BFloat16> storage;
};

/// Checks one sum against FP64. Products of BF16 are exact in FP32, so only the additions round: with terms of both
/// signs their errors stay below 2^-22 of the sum of magnitudes for any k here.
testing::AssertionResult near_exact(float got, double start, const std::vector<double>& a,
                                    const std::vector<double>& b) {
  double exact = start, magnitudes = std::fabs(start);
  for (size_t k = 0; k < a.size(); ++k) {
    exact += a[k] * b[k];
    magnitudes += std::fabs(a[k] * b[k]);
  }
  const double bound = 0x1p-22 * magnitudes;
  if (std::fabs(double(got) - exact) <= bound) return testing::AssertionSuccess();
  return testing::AssertionFailure() << fmt::format("got {:.9g}, exact {:.9g}, allowed error {:.3g}", got, exact,
                                                    bound);
}

bool same_bits(float a, float b) { return bits_of(a) == bits_of(b); }
constexpr uint32_t kPoison = 0xFFFFFFFFu;

class Bf16OpsTest : public testing::TestWithParam<std::string> {
 protected:
  const cpu::Bf16Ops& ops() const { return *static_cast<const cpu::Bf16Ops*>(cpu_backend(GetParam())->target_data); }
};

// ---- block_dot ----

struct BlockCase {
  int m, n, k;
  int a_gap = 0, b_gap = 0, c_gap = 0;  ///< elements between rows; of b in steps of 32
  bool accumulate = false;
};

/// Operands and result of a product; `b` has k / 2 rows of 2 n elements.
struct Block {
  Block(const BlockCase& c, Random& random)
      : a(c.m, c.k, c.k + c.a_gap, random),
        b(c.k / 2, 2 * c.n, 2 * c.n + c.b_gap, random),
        m(c.m),
        n(c.n),
        k(c.k),
        c_pitch(c.n + c.c_gap),
        sums((c.m - 1) * c_pitch + c.n),
        accumulate(c.accumulate) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < int64_t(m) * n; ++i) start.push_back(normal(random));
  }
  /// The part of rows m0..m1-1 and columns n0..n1-1, with fresh sums.
  void run(const cpu::Bf16Ops& ops, int m0, int m1, int n0, int n1) const {
    sums.poison();
    if (accumulate) {
      for (int i = m0; i < m1; ++i)
        std::copy_n(&start[size_t(i) * size_t(n) + size_t(n0)], n1 - n0, &sums[i * c_pitch + n0]);
    }
    ops.block_dot({.a = &a.at(m0, 0),
                   .a_pitch = a.pitch,
                   .m = m1 - m0,
                   .b = &b.at(0, 2 * n0),
                   .b_pitch = b.pitch,
                   .n = n1 - n0,
                   .k = k,
                   .c = &sums[m0 * c_pitch + n0],
                   .c_pitch = c_pitch,
                   .accumulate = accumulate});
  }
  void run(const cpu::Bf16Ops& ops) const { run(ops, 0, m, 0, n); }
  std::vector<double> column(int j) const {
    std::vector<double> values(static_cast<size_t>(k));
    for (int i = 0; i < k; ++i) values[size_t(i)] = to_float(b.at(i / 2, 2 * j + i % 2));
    return values;
  }
  float sum(int i, int j) const { return sums[i * c_pitch + j]; }

  Matrix a, b;
  int m, n, k;
  int64_t c_pitch;
  Guarded<float> sums;
  bool accumulate;
  std::vector<float> start;
};

void check_block(const cpu::Bf16Ops& ops, const BlockCase& c) {
  SCOPED_TRACE(fmt::format("m {} n {} k {} gaps {} {} {} accumulate {}", c.m, c.n, c.k, c.a_gap, c.b_gap, c.c_gap,
                           c.accumulate));
  Random random(uint32_t(c.m * 1000003 + c.n * 1009 + c.k));
  const Block block(c, random);
  block.run(ops);
  std::vector<std::vector<double>> rows;
  for (int i = 0; i < c.m; ++i) rows.push_back(block.a.row(i));
  for (int j = 0; j < c.n; ++j) {
    const std::vector<double> column = block.column(j);
    for (int i = 0; i < c.m; ++i) {
      const double start = c.accumulate ? double(block.start[size_t(i) * size_t(c.n) + size_t(j)]) : 0;
      ASSERT_TRUE(near_exact(block.sum(i, j), start, rows[size_t(i)], column)) << "element " << i << ", " << j;
    }
  }
  for (int i = 0; i + 1 < c.m; ++i) {
    for (int64_t j = c.n; j < block.c_pitch; ++j) {
      ASSERT_EQ(bits_of(block.sums[i * block.c_pitch + j]), kPoison) << "written between rows: " << i << ", " << j;
    }
  }
}

TEST_P(Bf16OpsTest, BlockDotOfEveryHeight) {
  Random random(1);
  for (int m = 1; m <= 70; ++m) {
    const int n = 16 * int(1 + random() % 8), k = 32 * int(1 + random() % 6);
    check_block(ops(), {.m = m,
                        .n = n,
                        .k = k,
                        .a_gap = int(random() % 5),
                        .b_gap = 32 * int(random() % 3),
                        .c_gap = int(random() % 5),
                        .accumulate = random() % 2 == 0});
    check_block(ops(), {.m = m, .n = 16, .k = 64, .accumulate = m % 2 == 0});
  }
}

TEST_P(Bf16OpsTest, BlockDotOfEveryWidth) {
  Random random(2);
  for (int n = 16; n <= 544; n += 16) {
    const int m = 1 + int(random() % 40), k = 32 * int(1 + random() % 3);
    check_block(ops(), {.m = m, .n = n, .k = k, .a_gap = 2, .b_gap = 32, .c_gap = 1, .accumulate = random() % 2 == 0});
  }
}

TEST_P(Bf16OpsTest, BlockDotOfEveryDepth) {
  for (int k = 32; k <= 1536; k += 32) check_block(ops(), {.m = 7 + k / 32 % 12, .n = 16 + 16 * (k / 32 % 3), .k = k});
}

TEST_P(Bf16OpsTest, BlockDotAtTheSizesOfTheStages) {
  for (const auto& [m, n, k] : {std::array{64, 32, 128}, {64, 16, 576}, {12, 512, 64}, {6, 512, 64}, {128, 64, 1536}}) {
    check_block(ops(), {.m = m, .n = n, .k = k});
    check_block(ops(), {.m = m, .n = n, .k = k, .accumulate = true});
  }
}

TEST_P(Bf16OpsTest, BlockDotOfOneTermIsExact) {
  for (const int m : {5, 33}) {
    Random random(7);
    const Block block({.m = m, .n = 48, .k = 96}, random);
    std::vector<int> place;  // of the only term of a row
    for (int i = 0; i < m; ++i) {
      for (int k = 0; k < block.k; ++k) block.a.at(i, k) = {};
      place.push_back(int(random() % 96));
      block.a.at(i, place.back()) = any_bf16(random, -60, 60);
    }
    for (int k = 0; k < block.k; ++k) {
      for (int j = 0; j < block.n; ++j) block.b.at(k / 2, 2 * j + k % 2) = any_bf16(random, -60, 60);
    }
    block.run(ops());
    for (int i = 0; i < m; ++i) {
      const int k = place[size_t(i)];
      for (int j = 0; j < block.n; ++j) {
        ASSERT_EQ(block.sum(i, j), to_float(block.a.at(i, k)) * to_float(block.b.at(k / 2, 2 * j + k % 2)))
            << fmt::format("element {}, {} with its term at k = {}", i, j, k);
      }
    }
  }
}

TEST_P(Bf16OpsTest, BlockDotElementsDependOnTheirRowAndColumnAlone) {
  for (const BlockCase& c :
       {BlockCase{.m = 45, .n = 112, .k = 96}, BlockCase{.m = 64, .n = 16, .k = 576},
        BlockCase{.m = 31, .n = 80, .k = 1536, .a_gap = 2, .b_gap = 32, .c_gap = 3, .accumulate = true}}) {
    SCOPED_TRACE(fmt::format("m {} n {} k {}", c.m, c.n, c.k));
    Random random(3);
    const Block block(c, random);
    block.run(ops());
    std::vector<float> whole;
    for (int i = 0; i < c.m; ++i)
      whole.insert(whole.end(), &block.sums[i * block.c_pitch], &block.sums[i * block.c_pitch] + c.n);
    const auto check = [&](int m0, int m1, int n0, int n1) {
      block.run(ops(), m0, m1, n0, n1);
      for (int i = m0; i < m1; ++i) {
        for (int j = n0; j < n1; ++j) {
          ASSERT_TRUE(same_bits(block.sum(i, j), whole[size_t(i) * size_t(c.n) + size_t(j)]))
              << fmt::format("element {}, {} of rows {}..{}, columns {}..{}: {:a}, in the whole {:a}", i, j, m0, m1 - 1,
                             n0, n1 - 1, block.sum(i, j), whole[size_t(i) * size_t(c.n) + size_t(j)]);
        }
      }
    };
    for (int i = 0; i < c.m; ++i) check(i, i + 1, 0, c.n);
    for (int j = 0; j < c.n; j += 16) check(0, c.m, j, j + 16);
    for (int i = 0; i < c.m; ++i) check(i, i + 1, i % (c.n / 16) * 16, i % (c.n / 16) * 16 + 16);
    for (int i = 1; i < c.m; ++i) check(0, i, 0, c.n);
  }
}

TEST_P(Bf16OpsTest, BlockDotKeepsNanAndInfinityToTheirRowAndColumn) {
  const BlockCase c{.m = 37, .n = 48, .k = 64};
  for (const uint16_t bits : {uint16_t(0x7FC1), uint16_t(0x7F80)}) {
    Random random(4);
    const Block block(c, random);
    block.run(ops());
    std::vector<float> clean(block.sums.data(), block.sums.data() + block.sums.size());
    constexpr int kRow = 18, kColumn = 33;
    block.a.at(kRow, 5).bits = bits;
    block.b.at(20, 2 * kColumn).bits = bits;
    block.run(ops());
    for (int i = 0; i < c.m; ++i) {
      for (int j = 0; j < c.n; ++j) {
        if (i == kRow || j == kColumn) {
          ASSERT_FALSE(std::isfinite(block.sum(i, j))) << i << ", " << j;
        } else {
          ASSERT_TRUE(same_bits(block.sum(i, j), clean[size_t(i * c.n + j)])) << i << ", " << j;
        }
      }
    }
  }
}

// ---- rows_dot ----

struct RowsCase {
  int n, b, k;
  int w_gap = 0, x_gap = 0, y_gap = 0;
};

/// Operands and result of vectors against a matrix.
struct Rows {
  Rows(const RowsCase& c, Random& random)
      : w(c.n, c.k, c.k + c.w_gap, random),
        x(c.b, c.k, c.k + c.x_gap, random),
        n(c.n),
        b(c.b),
        k(c.k),
        y_pitch(c.n + c.y_gap),
        sums((c.b - 1) * y_pitch + c.n) {}
  void run(const cpu::Bf16Ops& ops, int n0, int n1, int b0, int b1) const {
    sums.poison();
    ops.rows_dot({.w = &w.at(n0, 0),
                  .w_pitch = w.pitch,
                  .n = n1 - n0,
                  .x = &x.at(b0, 0),
                  .x_pitch = x.pitch,
                  .b = b1 - b0,
                  .k = k,
                  .y = &sums[b0 * y_pitch + n0],
                  .y_pitch = y_pitch});
  }
  void run(const cpu::Bf16Ops& ops) const { run(ops, 0, n, 0, b); }
  float sum(int vector, int row) const { return sums[vector * y_pitch + row]; }

  Matrix w, x;
  int n, b, k;
  int64_t y_pitch;
  Guarded<float> sums;
};

void check_rows(const cpu::Bf16Ops& ops, const RowsCase& c) {
  SCOPED_TRACE(fmt::format("n {} b {} k {} gaps {} {} {}", c.n, c.b, c.k, c.w_gap, c.x_gap, c.y_gap));
  Random random(uint32_t(c.n * 1000003 + c.b * 1009 + c.k));
  const Rows rows(c, random);
  rows.run(ops);
  for (int i = 0; i < c.n; ++i) {
    const std::vector<double> row = rows.w.row(i);
    for (int v = 0; v < c.b; ++v) {
      ASSERT_TRUE(near_exact(rows.sum(v, i), 0, row, rows.x.row(v))) << "vector " << v << ", row " << i;
    }
  }
  for (int v = 0; v + 1 < c.b; ++v) {
    for (int64_t i = c.n; i < rows.y_pitch; ++i) {
      ASSERT_EQ(bits_of(rows.sums[v * rows.y_pitch + i]), kPoison) << "written between rows: " << v << ", " << i;
    }
  }
}

TEST_P(Bf16OpsTest, RowsDotOfEveryCount) {
  // Odd gaps: rows begin at any BF16.
  for (int b = 1; b <= 20; ++b) {
    for (const int n : {1, 2, 3, 5, 16, 17, 31, 47, 63, 64, 65, 79, 130}) {
      check_rows(ops(), {.n = n, .b = b, .k = 128, .w_gap = n % 4, .x_gap = b % 4, .y_gap = (n + b) % 3});
    }
  }
  for (int n = 1; n <= 100; ++n)
    check_rows(ops(), {.n = n, .b = 1 + n % 9, .k = 256, .w_gap = 1, .x_gap = 3, .y_gap = 1});
}

TEST_P(Bf16OpsTest, RowsDotOfEveryDepth) {
  for (int k = 128; k <= 2304; k += 128) {
    for (const int b : {1, 2, 3, 4, 5, 6, 7, 8, 16}) check_rows(ops(), {.n = 21, .b = b, .k = k});
  }
}

TEST_P(Bf16OpsTest, RowsDotAtTheSizesOfTheStages) {
  check_rows(ops(), {.n = 300, .b = 40, .k = 512});
  check_rows(ops(), {.n = 512, .b = 4, .k = 128});
  check_rows(ops(), {.n = 192, .b = 16, .k = 1536});
}

TEST_P(Bf16OpsTest, RowsDotOfOneTermIsExact) {
  for (const int b : {1, 3, 8, 16}) {
    Random random(8);
    const Rows rows({.n = 128, .b = b, .k = 128}, random);
    for (int i = 0; i < rows.n; ++i) {
      for (int k = 0; k < rows.k; ++k) rows.w.at(i, k) = {};
      rows.w.at(i, i) = any_bf16(random, -60, 60);
    }
    for (int v = 0; v < b; ++v) {
      for (int k = 0; k < rows.k; ++k) rows.x.at(v, k) = any_bf16(random, -60, 60);
    }
    rows.run(ops());
    for (int v = 0; v < b; ++v) {
      for (int i = 0; i < rows.n; ++i) {
        ASSERT_EQ(rows.sum(v, i), to_float(rows.w.at(i, i)) * to_float(rows.x.at(v, i)))
            << "vector " << v << ", k = " << i;
      }
    }
  }
}

TEST_P(Bf16OpsTest, RowsDotElementsDependOnTheirRowAndVectorAlone) {
  for (const RowsCase& c : {RowsCase{.n = 83, .b = 37, .k = 256, .w_gap = 3, .x_gap = 1, .y_gap = 2},
                            RowsCase{.n = 300, .b = 19, .k = 1536}, RowsCase{.n = 40, .b = 9, .k = 2176}}) {
    SCOPED_TRACE(fmt::format("n {} b {} k {}", c.n, c.b, c.k));
    Random random(5);
    const Rows rows(c, random);
    rows.run(ops());
    const std::vector<float> whole(rows.sums.data(), rows.sums.data() + rows.sums.size());
    const auto check = [&](int n0, int n1, int b0, int b1) {
      rows.run(ops(), n0, n1, b0, b1);
      for (int v = b0; v < b1; ++v) {
        for (int i = n0; i < n1; ++i) {
          const float in_whole = whole[size_t(v * rows.y_pitch + i)];
          ASSERT_TRUE(same_bits(rows.sum(v, i), in_whole))
              << fmt::format("vector {}, row {} of vectors {}..{}, rows {}..{}: {:a}, in the whole {:a}", v, i, b0,
                             b1 - 1, n0, n1 - 1, rows.sum(v, i), in_whole);
        }
      }
    };
    for (int i = 0; i < c.n; i += 7) check(i, i + 1, 0, c.b);
    for (int v = 0; v < c.b; ++v) check(0, c.n, v, v + 1);
    for (int v = 1; v < c.b; ++v) check(c.n / 3, c.n, 0, v);
    for (int i = 0; i < std::min(c.n, c.b); ++i) check(i, i + 1, i, i + 1);
  }
}

TEST_P(Bf16OpsTest, RowsDotKeepsNanAndInfinityToTheirRowAndVector) {
  const RowsCase c{.n = 83, .b = 11, .k = 256};
  for (const uint16_t bits : {uint16_t(0x7FC1), uint16_t(0xFF80)}) {
    Random random(6);
    const Rows rows(c, random);
    rows.run(ops());
    const std::vector<float> clean(rows.sums.data(), rows.sums.data() + rows.sums.size());
    constexpr int kRow = 66, kVector = 4;
    rows.w.at(kRow, 255).bits = bits;
    rows.x.at(kVector, 130).bits = bits;
    rows.run(ops());
    for (int v = 0; v < c.b; ++v) {
      for (int i = 0; i < c.n; ++i) {
        if (i == kRow || v == kVector) {
          ASSERT_FALSE(std::isfinite(rows.sum(v, i))) << v << ", " << i;
        } else {
          ASSERT_TRUE(same_bits(rows.sum(v, i), clean[size_t(v * c.n + i)])) << v << ", " << i;
        }
      }
    }
  }
}

// ---- decode_e4m3 ----

using Decode = void (*)(const uint8_t*, BFloat16*, int64_t);

/// Every code at every place of a vector, from and to any address.
void check_decode(Decode decode) {
  for (int shift = 0; shift < 64; ++shift) {
    for (const int64_t n : {64, 256, 576}) {
      const Guarded<uint8_t> codes(n + shift % 3);
      const Guarded<BFloat16> values(n + shift % 5);
      const int64_t codes_at = shift % 3, values_at = shift % 5;
      for (int64_t i = 0; i < n; ++i) codes[codes_at + i] = uint8_t(i * 5 + shift * 4 + i / 64);
      decode(&codes[codes_at], &values[values_at], n);
      for (int64_t i = 0; i < n; ++i) {
        const uint8_t code = codes[codes_at + i];
        ASSERT_EQ(values[values_at + i].bits, to_bf16(e4m3_to_float(code)).bits)
            << fmt::format("code {:#x} at {} of {}", code, i, n);
      }
      for (int64_t i = 0; i < values_at; ++i) ASSERT_EQ(values[i].bits, 0xFFFF) << "written before the first";
    }
  }
}

/// 256 runs of 64: all codes at all 64 places.
void check_decode_exhaustively(Decode decode) {
  std::array<uint8_t, 64> codes{};
  std::array<BFloat16, 64> values{};
  for (int first = 0; first < 256; ++first) {
    for (size_t i = 0; i < 64; ++i) codes[i] = uint8_t(size_t(first) + i);
    decode(codes.data(), values.data(), 64);
    for (size_t i = 0; i < 64; ++i) {
      ASSERT_EQ(values[i].bits, to_bf16(e4m3_to_float(codes[i])).bits) << fmt::format("code {:#x} at {}", codes[i], i);
    }
  }
}

TEST_P(Bf16OpsTest, DecodesE4m3) {
  check_decode(ops().decode_e4m3);
  check_decode_exhaustively(ops().decode_e4m3);
}

#if defined(__x86_64__)
TEST(Bf16OpsAvx512, DecodesE4m3WithAndWithoutVbmi) {
  if (cpu::has_avx512_bf16()) {
    check_decode(cpu::decode_e4m3_avx512bw);
    check_decode_exhaustively(cpu::decode_e4m3_avx512bw);
  }
  if (cpu::has_avx512_vbmi()) {
    check_decode(cpu::decode_e4m3_vbmi);
    check_decode_exhaustively(cpu::decode_e4m3_vbmi);
  }
}
#endif

INSTANTIATE_TEST_SUITE_P(Targets, Bf16OpsTest,
                         testing::ValuesIn(std::vector<std::string>(cpu_targets().begin(), cpu_targets().end())),
                         [](const auto& tested) { return tested.param; });

}  // namespace
}  // namespace dsacore
