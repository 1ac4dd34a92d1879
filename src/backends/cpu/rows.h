// How the stages around the weights (query, index projection, value) take their rows, and how they divide their
// scratch.
//
// Up to kFewRows prepared rows, each row of a weight matrix is read once and dotted with all rows (Bf16Ops::rows_dot);
// above, rows go through Bf16Ops::block_dot in groups (row_group-inl.h). The two may sum in different orders, so the
// choice follows the prepared B alone and never the live rows: a padded step gives the bits of a full one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/bf16_ops.h"
#include "plan/registry.h"

namespace dsacore::cpu {

inline constexpr int kFewRows = 16;
inline constexpr int kRowGroup = 64;  ///< rows that share one packed block
inline constexpr int kPackRows = 16;  ///< rows that are packed at once: block_dot's columns come in sixteens

inline Verdict accepts_few_rows(const ShapeKey& shape) {
  if (shape.rows <= kFewRows) return {};
  return {false, "takes up to 16 rows"};
}
inline Verdict accepts_many_rows(const ShapeKey& shape) {
  if (shape.rows > kFewRows) return {};
  return {false, "takes 17 rows and more"};
}

/// A group of rows and the columns of its packed block.
struct RowGroup {
  int first;
  int rows;
  int columns;  ///< rows, rounded up to 16
};
constexpr int groups_of(int rows) { return (rows + kRowGroup - 1) / kRowGroup; }
constexpr RowGroup row_group(int rows, int group) {
  const int first = group * kRowGroup;
  const int live = rows - first < kRowGroup ? rows - first : kRowGroup;
  return {first, live, (live + kPackRows - 1) / kPackRows * kPackRows};
}

/// Hands out 64-byte aligned pieces of a workspace's scratch, in order. From null it only counts.
class ScratchPieces {
 public:
  explicit ScratchPieces(std::byte* base) : base_(base) {}

  template <class T>
  T* take(int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  int64_t bytes_ = 0;
};

inline const Bf16Ops& ops_of(const Workspace& workspace) { return *static_cast<const Bf16Ops*>(workspace.target); }

}  // namespace dsacore::cpu
