// The slices one rank computes in one step, in the coordinates of its query buffer and the step's key buffer.
// Plain C++20; knows nothing of exchanges.
#pragma once

#include <span>
#include <vector>

#include "base/slice.h"
#include "solver/ownership.h"

namespace magi {

// Tightened, non-empty, sorted by (q_start, k_start, lo); neighbours that are one slice again are one.
// `keys` holds the tokens of the step's buffer.
std::vector<Slice> build_local_slices(std::span<const Slice> slices, const RowIndex& queries, const RowIndex& keys);

// Joins two slices without a common cell when their cells are those of one slice.
bool try_join(Slice& into, const Slice& other);

}  // namespace magi
