// Spec 9 as the oracle's check.py applies it, for the tensors of the query stages, the caches and the output: how far a
// backend's tensor may be from the reference's. Each check names the first element that is out of bounds.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "format/layouts.h"
#include "format/paging.h"
#include "io/generate.h"
#include "support/stages.h"

namespace dsacore::test {

inline constexpr double kBoundOut = 8e-3, kBoundQuery = 2e-3, kBoundWeight = 1e-6;
inline constexpr double kRowFactor = 4;       // no row may be worse than this times the tensor's bound
inline constexpr double kShare = 0.005;       // of codes that may be neighbours, of scales that may move by one unit
inline constexpr double kCodeSlack = 0x1p-7;  // of a head's largest value

/// Integers in the order of the values; neighbours differ by one, -0 and +0 are the same.
inline int bf16_order(BFloat16 x) { return x.bits & 0x8000 ? -int(x.bits & 0x7FFF) : int(x.bits); }
inline int e4m3_order(uint8_t code) { return code & 0x80 ? -int(code & 0x7F) : int(code); }
inline int e2m1_order(uint8_t code) { return code & 8 ? -int(code & 7) : int(code & 7); }

/// Rows whose own inputs are finite and whose request is not padding: the others are not judged.
inline std::vector<int64_t> judged_rows(const Case& c, int64_t rows) {
  std::vector<int64_t> judged;
  for (int64_t row = 0; row < rows; ++row) {
    bool finite = c.step.seq_lens(row / c.step.q) > 0;
    for (int64_t i = 0; i < c.sizes.width(); ++i) finite = finite && std::isfinite(to_float(c.step.projected(row, i)));
    if (finite) judged.push_back(row);
  }
  return judged;
}

/// Tally of codes that are equal, next to each other or further apart, and of scales that moved by one unit.
class CodeTally {
 public:
  void code(int got, int want, bool near_enough, const std::string& where) {
    ++total_;
    const int gap = std::abs(got - want);
    if (gap == 0) return;
    if (gap == 1 || near_enough) {
      ++differ_;
    } else {
      note(far_, where + ": code of order " + std::to_string(got) + ", must be " + std::to_string(want));
    }
  }
  void wrong(const std::string& what) { note(wrong_, what); }

  /// Codes of one block with power-of-two scales; a block whose scale moved is judged on its values, within `coarse` of
  /// the larger one: `relative` of it plus `units` of both scales.
  template <class Order, class Decode>
  void block(const std::vector<uint8_t>& got, const std::vector<uint8_t>& want, double got_scale, double want_scale,
             Order order, Decode decode, double relative, double units, const std::string& where) {
    ++scales_;
    const bool same = got_scale == want_scale;
    if (!same && got_scale != 2 * want_scale && want_scale != 2 * got_scale) {
      return wrong(where + ": scale " + std::to_string(got_scale) + ", must be " + std::to_string(want_scale));
    }
    moved_ += same ? 0 : 1;
    for (size_t i = 0; i < got.size(); ++i) {
      const std::string at = where + "[" + std::to_string(i) + "]";
      if (same) {
        code(order(got[i]), order(want[i]), false, at);
        continue;
      }
      const double x = double(decode(got[i])) * got_scale, y = double(decode(want[i])) * want_scale;
      const double allowed = std::max(std::abs(x), std::abs(y)) * relative + (got_scale + want_scale) * units;
      if (!(std::abs(x - y) <= allowed)) note(far_, at + ": " + std::to_string(x) + ", must be " + std::to_string(y));
    }
  }

  ::testing::AssertionResult verdict(const std::string& name) const {
    const int64_t allowed = std::max<int64_t>(4, int64_t(std::ceil(kShare * double(total_))));
    const int64_t may_move = std::max<int64_t>(1, int64_t(std::ceil(kShare * double(scales_))));
    if (far_ == 0 && wrong_ == 0 && differ_ <= allowed && moved_ <= may_move) return ::testing::AssertionSuccess();
    std::ostringstream text;
    text << name << ": " << differ_ << " of " << total_ << " codes are neighbours (allowed " << allowed << "), "
         << moved_ << " of " << scales_ << " scales moved (allowed " << may_move << "), " << far_
         << " codes further apart, " << wrong_ << " fields wrong; first: " << first_;
    return ::testing::AssertionFailure() << text.str();
  }

 private:
  void note(int64_t& count, const std::string& what) {
    ++count;
    if (first_.empty()) first_ = what;
  }
  int64_t total_ = 0, differ_ = 0, far_ = 0, scales_ = 0, moved_ = 0, wrong_ = 0;
  std::string first_;
};

/// At most one BF16 unit apart, 99.9 % equal.
inline ::testing::AssertionResult nearly_equal(const View<BFloat16, 2>& got, const View<BFloat16, 2>& want,
                                               const std::vector<int64_t>& rows, const std::string& name) {
  int64_t near = 0, total = 0;
  for (const int64_t row : rows) {
    for (int64_t i = 0; i < want.extent(1); ++i, ++total) {
      const int gap = std::abs(bf16_order(got(row, i)) - bf16_order(want(row, i)));
      if (gap > 1) {
        return ::testing::AssertionFailure() << name << "[" << row << "][" << i << "] = " << to_float(got(row, i))
                                             << ", must be " << to_float(want(row, i));
      }
      near += gap;
    }
  }
  if (near <= std::max<int64_t>(2, total / 1000)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << name << ": " << near << " of " << total << " are one BF16 unit apart";
}

/// ||got - want|| / ||want|| below the bound over the rows together, and below kRowFactor times it for each.
template <class Value>
::testing::AssertionResult norm_agrees(Value got, Value want, const std::vector<int64_t>& rows, int64_t width,
                                       double bound, const std::string& name) {
  double difference = 0, size = 0;
  for (const int64_t row : rows) {
    double row_difference = 0, row_size = 0;
    for (int64_t i = 0; i < width; ++i) {
      const double x = got(row, i), y = want(row, i);
      if (!std::isfinite(x)) return ::testing::AssertionFailure() << name << "[" << row << "][" << i << "] = " << x;
      row_difference += (x - y) * (x - y);
      row_size += y * y;
    }
    const double e = std::sqrt(row_difference) / std::max(std::sqrt(row_size), 1e-30);
    if (!(e < kRowFactor * bound)) return ::testing::AssertionFailure() << name << ": row " << row << " has e = " << e;
    difference += row_difference;
    size += row_size;
  }
  const double e = size > 0 ? std::sqrt(difference / size) : (difference > 0 ? 1.0 : 0.0);
  if (e < bound) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << name << ": e = " << e << ", bound " << bound;
}

/// Query rows given the same q_c.
inline ::testing::AssertionResult query_agrees(const StageRunner& got, const StageRunner& want,
                                               const std::vector<int64_t>& rows) {
  const int heads = want.query.heads;
  if (want.query.element == 2) {
    const auto value = [heads](const StageRunner& r) {
      return [&r, heads](int64_t row, int64_t i) {
        return double(to_float(r.query.bf16(row, int(i / kQueryRow) % heads)[i % kQueryRow]));
      };
    };
    using Value = std::function<double(int64_t, int64_t)>;
    return norm_agrees(Value(value(got)), Value(value(want)), rows, int64_t(heads) * kQueryRow, kBoundQuery, "query");
  }
  CodeTally tally;
  for (const int64_t row : rows) {
    for (int head = 0; head < heads; ++head) {
      const uint8_t* x = got.query.e4m3(row, head);
      const uint8_t* y = want.query.e4m3(row, head);
      float largest = 0;
      for (int i = 0; i < kQueryRow; ++i) largest = std::max(largest, magnitude(e4m3_to_float(y[i])));
      for (int i = 0; i < kQueryRow; ++i) {
        const double gap = std::abs(double(e4m3_to_float(x[i])) - double(e4m3_to_float(y[i])));
        tally.code(e4m3_order(x[i]), e4m3_order(y[i]), gap <= kCodeSlack * double(largest),
                   "query[" + std::to_string(row) + "][" + std::to_string(head) + "][" + std::to_string(i) + "]");
      }
    }
  }
  return tally.verdict("query");
}

/// Adds one row of the MLA cache to a tally.
inline void tally_kv_row(CodeTally& tally, KvFormat format, const std::byte* got, const std::byte* want,
                         const std::string& where) {
  const auto codes = [](const std::byte* at, int n) {
    std::vector<uint8_t> v(static_cast<size_t>(n));
    std::memcpy(v.data(), at, v.size());
    return v;
  };
  const auto nibbles = [](const std::byte* at, int n) {
    std::vector<uint8_t> v;
    for (int i = 0; i < n; ++i) v.push_back(i % 2 == 0 ? uint8_t(at[i / 2]) & 15 : uint8_t(at[i / 2]) >> 4);
    return v;
  };
  if (format == KvFormat::kFp8DsMla) {
    using L = KvFp8DsMla;
    for (int tile = 0; tile < L::kTiles; ++tile) {
      const int at = L::kValuesAt + tile * L::kTile;
      tally.block(codes(got + at, L::kTile), codes(want + at, L::kTile), L::scale(got, tile), L::scale(want, tile),
                  e4m3_order, e4m3_to_float, 1.0 / 8, 0x1p-9, where);
    }
    if (std::memcmp(got + L::kPeAt, want + L::kPeAt, kPe * sizeof(BFloat16)) != 0) tally.wrong(where + ": pe");
  } else if (format == KvFormat::kFp8) {
    for (int i = 0; i < KvFp8::kRowBytes; ++i)
      tally.code(e4m3_order(uint8_t(got[i])), e4m3_order(uint8_t(want[i])), false, where);
  } else {
    using L = KvNvfp4DsMla;
    for (int block = 0; block < L::kBlocks; ++block) {
      const int x = e4m3_order(uint8_t(got[L::scale_at(block)])), y = e4m3_order(uint8_t(want[L::scale_at(block)]));
      if (std::abs(x - y) > 1) tally.wrong(where + ": scale of block " + std::to_string(block));
      const auto a = nibbles(got + L::kValuesAt + block * L::kBlock / 2, L::kBlock);
      const auto b = nibbles(want + L::kValuesAt + block * L::kBlock / 2, L::kBlock);
      for (int i = 0; i < L::kBlock; ++i) {
        const int gap = std::abs(e2m1_order(a[size_t(i)]) - e2m1_order(b[size_t(i)]));
        // Where the scale moved, neighbours are free.
        tally.code(x == y || gap > 1 ? e2m1_order(a[size_t(i)]) : e2m1_order(b[size_t(i)]), e2m1_order(b[size_t(i)]),
                   false, where);
      }
    }
    if (std::memcmp(got + L::kPeAt, want + L::kPeAt, kPe) != 0) tally.wrong(where + ": pe");
  }
}

/// Inserted rows of the MLA cache within the bounds, every other byte as the reference left it.
inline ::testing::AssertionResult kv_cache_agrees(const StageRunner& got, const StageRunner& want,
                                                  const std::vector<int64_t>& rows) {
  CodeTally tally;
  std::vector<std::byte> rest = got.kv_bytes;
  for (int64_t row = 0; row < got.rows; ++row) {
    const Slot slot(got.step().slots(row));
    if (slot.value() < 0) continue;
    const int64_t at =
        int64_t(physical_row(place_of(slot, got.kv.page), got.kv.stride_rows).value()) * got.kv.row_bytes;
    if (std::find(rows.begin(), rows.end(), row) != rows.end()) {
      tally_kv_row(tally, got.kv.format, got.kv_bytes.data() + at, want.kv_bytes.data() + at,
                   "kv_cache, row " + std::to_string(row));
    }
    std::memcpy(rest.data() + at, want.kv_bytes.data() + at, size_t(got.kv.row_bytes));
  }
  if (rest != want.kv_bytes)
    return ::testing::AssertionFailure() << "kv_cache: bytes outside the inserted rows changed";
  return tally.verdict("kv_cache");
}

/// Inserted tokens of the index cache within the bounds, every other byte as the reference left it.
inline ::testing::AssertionResult index_cache_agrees(const StageRunner& got, const StageRunner& want,
                                                     const std::vector<int64_t>& rows) {
  CodeTally tally;
  std::vector<std::byte> rest = got.index_bytes;
  with_layout(got.index.format, [&](auto layout) {
    using L = decltype(layout);
    constexpr bool kE4m3 = std::is_same_v<L, IndexFp8>;
    constexpr int kBlocks = kE4m3 ? 1 : IndexMxfp4::kBlocks;
    for (int64_t row = 0; row < got.rows; ++row) {
      const Slot slot(got.step().index_slots(row));
      if (slot.value() < 0) continue;
      const Place place = place_of(slot, kIndexPage);
      const int64_t page = int64_t(place.page.value()) * L::kPageBytes;
      const std::byte* a = got.index_bytes.data() + page;
      const std::byte* b = want.index_bytes.data() + page;
      const std::string where = "index_cache, row " + std::to_string(row);
      const bool judged = std::find(rows.begin(), rows.end(), row) != rows.end();
      for (int block = 0; judged && block < kBlocks; ++block) {
        std::vector<uint8_t> x, y;
        for (int i = 0; i < kIndexDim / kBlocks; ++i) {
          const int element = block * (kIndexDim / kBlocks) + i;
          const auto code = [&](const std::byte* p) {
            const int at = L::value_at(place.offset) + (kE4m3 ? element : element / 2);
            return kE4m3 ? uint8_t(p[at]) : uint8_t(element % 2 == 0 ? uint8_t(p[at]) & 15 : uint8_t(p[at]) >> 4);
          };
          x.push_back(code(a));
          y.push_back(code(b));
        }
        if constexpr (kE4m3) {
          tally.block(x, y, L::scale(a, place.offset), L::scale(b, place.offset), e4m3_order, e4m3_to_float, 1.0 / 8,
                      0x1p-9, where);
        } else {
          tally.block(x, y, L::scale(a, place.offset, block), L::scale(b, place.offset, block), e2m1_order,
                      e2m1_to_float, 0, 1, where);
        }
      }
      std::memcpy(rest.data() + page + L::value_at(place.offset), b + L::value_at(place.offset), L::kValueBytes);
      std::memcpy(rest.data() + page + L::scale_at(place.offset), b + L::scale_at(place.offset), L::kScaleBytes);
    }
    return 0;
  });
  if (rest != want.index_bytes)
    return ::testing::AssertionFailure() << "index_cache: bytes outside the inserted tokens changed";
  return tally.verdict("index_cache");
}

/// Head weights to 1e-6 relative but for scales that moved by one unit; index query codes with their scales.
inline ::testing::AssertionResult index_query_agrees(const StageRunner& got, const StageRunner& want,
                                                     const std::vector<int64_t>& rows) {
  CodeTally tally;
  for (const int64_t row : rows) {
    for (int64_t head = 0; head < want.index_query.extent(1); ++head) {
      const std::string where = "index_query[" + std::to_string(row) + "][" + std::to_string(head) + "]";
      const double a = double(got.head_weights(row, head)), b = double(want.head_weights(row, head));
      double moved = 1;
      if (b != 0 && (a == 2 * b || b == 2 * a)) moved = a / b;
      const double gap = std::abs(a - b * moved);
      if (!(gap <= kBoundWeight * std::abs(b * moved)) && a != b) {
        return ::testing::AssertionFailure()
               << "head_weights[" << row << "][" << head << "] = " << a << ", must be " << b;
      }
      const uint8_t* x = got.index_query.row(row, head);
      const uint8_t* y = want.index_query.row(row, head);
      tally.block({x, x + kIndexDim}, {y, y + kIndexDim}, moved, 1.0, e4m3_order, e4m3_to_float, 1.0 / 8, 0x1p-9,
                  where);
    }
  }
  return tally.verdict("index_query");
}

/// Equal bytes, or the place of the first difference.
inline ::testing::AssertionResult same_bytes(const void* got, const void* want, int64_t bytes,
                                             const std::string& name) {
  const auto* a = static_cast<const uint8_t*>(got);
  const auto* b = static_cast<const uint8_t*>(want);
  for (int64_t i = 0; i < bytes; ++i) {
    if (a[i] != b[i]) {
      return ::testing::AssertionFailure() << name << " differs first at byte " << i << " of " << bytes << ": "
                                           << int(a[i]) << ", must be " << int(b[i]);
    }
  }
  return ::testing::AssertionSuccess();
}

/// A writable element of the case's projected rows.
inline BFloat16& projected_at(Case& c, int64_t row, int64_t column) {
  return const_cast<BFloat16&>(c.step.projected(row, column));
}

}  // namespace dsacore::test
