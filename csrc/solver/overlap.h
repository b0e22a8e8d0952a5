// Canonical order of a mask's slices, and whether two of them cover one cell. Near-linear in the number of slices.
// Knows nothing of ranks, chunks, Python or where the slices came from.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/slice.h"

namespace magi {

struct CanonicalSlices {
    std::vector<Slice> slices;    // tightened, without empty ones, by (q_start, k_start, lo, hi)
    std::vector<int32_t> source;  // position of each in the input
};

CanonicalSlices canonical_slices(std::span<const Slice> slices);

struct Overlap {
    int32_t first = 0, second = 0;  // positions in the checked span, first < second
    int64_t num_cells = 0;          // cells that these two share
};

// Two slices that share a cell, or nothing. `slices` are tight and sorted by q_start. The same pair on every machine.
std::optional<Overlap> find_overlap(std::span<const Slice> slices);

}  // namespace magi
