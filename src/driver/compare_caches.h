// The caches' part of a comparison (spec 9): inserted rows as the expected ones, every other byte as it was.
#pragma once

#include "driver/agreement.h"
#include "driver/inputs.h"
#include "driver/judged_rows.h"

namespace dsacore {

AgreementLine compare_kv_cache(const Inputs& before, const KvCache& expected, const KvCache& got,
                               const JudgedRows& judged);
AgreementLine compare_index_cache(const Inputs& before, const IndexCache& expected, const IndexCache& got,
                                  const JudgedRows& judged);

}  // namespace dsacore
