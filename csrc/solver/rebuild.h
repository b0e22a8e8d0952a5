// From local slices back to tokens, for checks: the inverse of local_slices by another route.
// Plain C++20; knows nothing of how local slices were made.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/slice.h"
#include "solver/intervals.h"

namespace magi {

// The cells of local slices in global tokens: one tightened fragment per pair of runs that a slice meets.
// Throws InputError when a slice reaches outside the buffers.
std::vector<Slice> globalize(std::span<const Slice> local, const RowIndex& queries, const RowIndex& keys);

// Per fragment, how many of its cells are in the slices (which must be sorted by q_start and share no cell).
std::vector<int64_t> count_seen_cells(std::span<const Slice> fragments, std::span<const Slice> slices);

}  // namespace magi
