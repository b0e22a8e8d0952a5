// In which order each receiver takes its parts, so that no owner is asked for much more in one step than in another.
// Plain C++20; knows nothing of masks or local slices.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "solver/intervals.h"
#include "solver/ownership.h"

namespace magi {

// Step s takes part (first + parts - s) % parts.
inline int32_t part_of_step(int32_t first, int32_t parts, int32_t step) { return (first + parts - step) % parts; }

// The first part of every group. wanted: remote keys of each group; cuts: tokens between its parts, [parts + 1] or empty.
//
// Default is a ring: the part before the group's place in the sequence, then down and around. Where transfers are few and
// therefore uneven, groups then choose in turn the first part that meets the least that others already ask of the same owners
// in the same steps. Only sums of products of rows: integers, equal on every machine.
std::vector<int32_t> choose_first_parts(std::span<const RowIndex> wanted, const std::vector<std::vector<int32_t>>& cuts,
                                        const Ownership& keys);

}  // namespace magi
