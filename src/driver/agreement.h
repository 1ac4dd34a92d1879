// Measures of spec 9: tallies of equal and neighbouring codes, relative errors of rows. Arithmetic only; compare.cpp
// applies them to the tensors.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dsacore/formats.h"

namespace dsacore {

/// What one tensor's comparison found.
struct AgreementLine {
  std::string tensor;
  std::string figure;  ///< what was found, in words and numbers
  std::string bound;   ///< what is allowed
  bool ok = false;
};

/// Integers in the order of the values of codes; neighbours differ by one, -0 and +0 are the same.
int order_of_bf16(BFloat16 code);
int order_of_e4m3(uint8_t code);
int order_of_e2m1(uint8_t code);

/// A block of codes under one scale, as one side has it.
struct CodeBlock {
  std::span<const uint8_t> codes;
  double scale = 1;
};

enum class CodeKind { kE4m3, kE2m1 };

/// Counts codes that are equal, next to each other or further apart, and scales that moved by one unit.
class CodeTally {
 public:
  /// Codes without a scale of their own. Codes further apart than neighbours count as such where their values differ by
  /// at most `slack` of the largest expected value of the span.
  void codes(CodeKind kind, std::span<const uint8_t> got, std::span<const uint8_t> expected, double slack = 0);
  /// Codes under a power-of-two scale. Where the scale is a factor of two off, its codes go along: they may differ by
  /// what one code of the coarser scale holds, and do not count as neighbours.
  void block(CodeKind kind, CodeBlock got, CodeBlock expected);
  /// A scale that is itself a code (`nvfp4_ds_mla`) and may be the neighbour; its codes must then be neighbours at
  /// most, and are not counted.
  void coded_block(std::span<const uint8_t> got, uint8_t got_scale, std::span<const uint8_t> expected,
                   uint8_t expected_scale);
  /// Bytes that must be equal.
  void exact(std::span<const std::byte> got, std::span<const std::byte> expected);

  AgreementLine line(std::string tensor) const;

 private:
  void scale(bool same, bool near);

  int64_t total_ = 0, differ_ = 0, far_ = 0;
  int64_t scales_ = 0, moved_ = 0, wrong_ = 0;
};

/// Whether one is twice the other.
bool factor_two(double a, double b);

/// e = ||got - expected|| / ||expected|| over the rows added, and the worst row's own.
class RowErrors {
 public:
  /// A row that is not finite on the expected side is not judged.
  void add(int64_t row, std::span<const double> got, std::span<const double> expected);
  /// Passes where e < bound and no row is worse than 4 times the bound.
  AgreementLine line(std::string tensor, double bound) const;

 private:
  double difference_ = 0, norm_ = 0;
  double worst_ = 0;
  int64_t worst_row_ = -1;
  int64_t not_finite_row_ = -1;
};

/// How many of `total` may be the neighbour, spec 9's 0.5 % with a floor for small tensors.
int64_t allowed_share(int64_t total, int64_t at_least);

}  // namespace dsacore
