// Visible pairs in each cell of a rectangular grid over the mask, in closed form per (slice, cell) that meet.
// Knows nothing of pictures, ranks or chunks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/slice.h"

namespace magi {

// Edges are ascending; cell (a, b) is rows [q_edges[a], q_edges[a+1]) and keys [k_edges[b], k_edges[b+1]).
// Returns int64 [num q cells * num k cells], row major. Time is proportional to the cells that slices touch.
std::vector<int64_t> grid_area(std::span<const Slice> slices, std::span<const int32_t> q_edges, std::span<const int32_t> k_edges);

}  // namespace magi
