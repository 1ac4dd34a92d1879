// The overlap modes: which mode runs for what is asked, and the launches of each, with the rule for held kernels.
#include "plan/overlap.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace dsacore {
namespace {

constexpr OverlapMode kModes[] = {OverlapMode::kSerial, OverlapMode::kWait, OverlapMode::kFork,
                                  OverlapMode::kFront,  OverlapMode::kLate, OverlapMode::kLateFront};

/// Kernels that allow every mode of those with, or without a front: a front or a norm, one query, a fused indexer.
OverlapTraits able(bool front) {
  OverlapTraits traits;
  traits.has_side = true;
  traits.norm = !front;
  traits.front = front;
  traits.fused_indexer = true;
  return traits;
}

OverlapMode effective(OverlapMode wanted, const OverlapTraits& traits, OverlapMode unfused = OverlapMode::kSerial) {
  return effective_mode(wanted, unfused, traits);
}

/// "norm index_projection query@side+fork indexer sparse_core+join value"
std::string text(const LaunchList& list) {
  std::string text;
  for (const Launch& launch : list) {
    text += (text.empty() ? "" : " ") + std::string(name_of(launch.stage));
    if (launch.lane == Lane::kSide) text += "@side";
    if (launch.forks) text += "+fork";
    if (launch.joins) text += "+join";
    if (launch.beside) text += "+beside";
  }
  return text;
}

std::string launches(OverlapMode wanted, const OverlapTraits& traits) {
  return text(LaunchList(effective(wanted, traits), traits));
}

TEST(Overlap, EachModeHasItsLaunches) {
  const std::string serial = "query index_projection indexer sparse_core value";
  EXPECT_EQ(launches(OverlapMode::kSerial, able(true)), serial);
  EXPECT_EQ(launches(OverlapMode::kWait, able(true)), serial);
  EXPECT_EQ(launches(OverlapMode::kFork, able(false)),
            "norm index_projection query@side+fork indexer sparse_core+join value");
  EXPECT_EQ(launches(OverlapMode::kFront, able(true)),
            "index_projection query@side+fork indexer sparse_core+join value");
  EXPECT_EQ(launches(OverlapMode::kLate, able(false)), "norm index_projection indexer query+beside sparse_core value");
  EXPECT_EQ(launches(OverlapMode::kLateFront, able(true)), "index_projection indexer query+beside sparse_core value");
}

TEST(Overlap, BackendsOfTheHostRunAllModesAsSerial) {
  OverlapTraits traits = able(true);
  traits.has_side = false;
  for (OverlapMode mode : kModes) EXPECT_EQ(effective(mode, traits), OverlapMode::kSerial) << name_of(mode);
}

TEST(Overlap, WaitNeedsAMailbox) {
  OverlapTraits traits = able(true);
  EXPECT_EQ(effective(OverlapMode::kWait, traits), OverlapMode::kSerial);
  traits.ranks = 2;
  EXPECT_EQ(effective(OverlapMode::kWait, traits), OverlapMode::kWait);
}

TEST(Overlap, AFrontNeedsNoNormAndItsModesNeedAFront) {
  EXPECT_EQ(effective(OverlapMode::kFork, able(true)), OverlapMode::kFront);
  EXPECT_EQ(effective(OverlapMode::kLate, able(true)), OverlapMode::kLateFront);
  EXPECT_EQ(effective(OverlapMode::kFront, able(false)), OverlapMode::kFork);
  EXPECT_EQ(effective(OverlapMode::kLateFront, able(false)), OverlapMode::kLate);
  OverlapTraits both = able(true);
  both.norm = true;
  for (OverlapMode mode : {OverlapMode::kFork, OverlapMode::kFront, OverlapMode::kLate, OverlapMode::kLateFront}) {
    EXPECT_EQ(effective(mode, both), mode);
  }
  OverlapTraits neither = able(false);
  neither.norm = false;
  for (OverlapMode mode : kModes) EXPECT_EQ(effective(mode, neither), OverlapMode::kSerial) << name_of(mode);
}

TEST(Overlap, LateModesNeedOneRankAndAFusedIndexer) {
  for (bool front : {false, true}) {
    const OverlapMode late = front ? OverlapMode::kLateFront : OverlapMode::kLate;
    const OverlapMode beside = front ? OverlapMode::kFront : OverlapMode::kFork;
    EXPECT_EQ(effective(late, able(front)), late);
    OverlapTraits traits = able(front);
    traits.ranks = 2;
    EXPECT_EQ(effective(late, traits), beside);
    traits = able(front);
    traits.fused_indexer = false;
    EXPECT_EQ(effective(late, traits), OverlapMode::kSerial) << "what the tables say of the unfused case";
    EXPECT_EQ(effective(late, traits, beside), beside);
    EXPECT_EQ(effective(late, traits, late), beside) << "a table that asks for a late mode there too";
  }
}

TEST(Overlap, NoStepIsSerialUnderDcp) {
  OverlapTraits traits = able(false);
  EXPECT_EQ(effective(OverlapMode::kSerial, traits), OverlapMode::kSerial);
  traits.ranks = 4;
  EXPECT_EQ(effective(OverlapMode::kSerial, traits), OverlapMode::kFork);
  EXPECT_EQ(effective(OverlapMode::kLate, traits), OverlapMode::kFork);
  traits.has_side = false;
  EXPECT_EQ(effective(OverlapMode::kSerial, traits), OverlapMode::kSerial) << "on the host";
}

/// Stages that must have ended before a launch that does not start early: the last before it on its lane, and the other
/// lane's last where it joins.
std::vector<std::string> keeping(const LaunchList& list) {
  std::vector<std::string> names;
  for (const Launch* before = list.begin(); before != list.end(); ++before) {
    const Launch* next = before + 1;  // the first on the same lane, or that joins it
    while (next != list.end() && next->lane != before->lane && !next->joins) ++next;
    if (next != list.end() && !next->starts_early) names.emplace_back(name_of(before->stage));
  }
  return names;
}

TEST(Overlap, WithoutHeldKernelsEveryLaunchReleasesTheNext) {
  for (OverlapMode mode : kModes) {
    for (bool front : {false, true}) {
      const OverlapTraits traits = able(front);
      const LaunchList list(effective(mode, traits), traits);
      EXPECT_TRUE(keeping(list).empty()) << name_of(mode);
      for (int i = 0; i < list.size(); ++i) EXPECT_TRUE(list.begin()[i].starts_early) << name_of(mode) << " " << i;
    }
  }
}

TEST(Overlap, NothingReleasesAHeldSparseCoreEarly) {
  const auto before_core = [](OverlapMode mode, bool front) {
    OverlapTraits traits = able(front);
    traits.held[static_cast<size_t>(StageId::kSparseCore)] = true;
    const LaunchList list(effective(mode, traits), traits);
    for (int i = 0; i < list.size(); ++i) {
      EXPECT_EQ(list.begin()[i].starts_early, list.begin()[i].stage != StageId::kSparseCore) << name_of(mode);
    }
    return keeping(list);
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(before_core(OverlapMode::kSerial, true), Names{"indexer"});
  EXPECT_EQ(before_core(OverlapMode::kFork, false), (Names{"query", "indexer"})) << "both that it joins";
  EXPECT_EQ(before_core(OverlapMode::kFront, true), (Names{"query", "indexer"}));
  EXPECT_EQ(before_core(OverlapMode::kLate, false), Names{"query"});
  EXPECT_EQ(before_core(OverlapMode::kLateFront, true), Names{"query"});
}

TEST(Overlap, AHeldFirstKernelWaitsForTheStepBefore) {
  OverlapTraits traits = able(true);
  traits.held[static_cast<size_t>(StageId::kIndexProjection)] = true;
  const LaunchList list(OverlapMode::kLateFront, traits);
  EXPECT_FALSE(list.begin()[0].starts_early);
  EXPECT_TRUE(keeping(list).empty()) << "what it follows belongs to another step";
}

TEST(Overlap, TheSideLaneIsUsedByForkAndFrontAlone) {
  for (OverlapMode mode : kModes) {
    for (bool front : {false, true}) {
      const OverlapTraits traits = able(front);
      const OverlapMode runs = effective(mode, traits);
      const LaunchList list(runs, traits);
      EXPECT_EQ(list.uses_side(), runs == OverlapMode::kFork || runs == OverlapMode::kFront) << name_of(mode);
      EXPECT_EQ(list.has_norm(), runs == OverlapMode::kFork || runs == OverlapMode::kLate) << name_of(mode);
    }
  }
}

}  // namespace
}  // namespace dsacore
