// Improves an assignment by moves and swaps of single chunks, within a bounded amount of work.
// Deterministic: fixed visiting order, integer gains, first of equals.
#pragma once

#include "solver/dispatch.h"

namespace magi {

// Lowers the largest area until it is at most target_area or nothing helps. Receivers never pass max_tokens (they may keep what they
// have). With is_even only swaps are made. max_work bounds the chunk pairs looked at.
void balance_search(const DispatchDesc& desc, int64_t target_area, int64_t max_tokens, int64_t max_work, Owners& owner);

// Swaps neighbours of run ends so that fewer key rows travel; areas stay within max(limits.max_area, the present largest) and tokens
// likewise. max_work bounds the key intervals read.
void locality_search(const DispatchDesc& desc, const BalanceLimits& limits, int64_t max_work, Owners& owner);

}  // namespace magi
