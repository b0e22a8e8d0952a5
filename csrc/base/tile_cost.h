// What a tile costs an attention kernel, and which columns of a piece need no mask. Shared by the host and the device planner.
// Knows nothing of lists, heads or kernels.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "base/slice.h"

namespace magi {

// Relative times: an edge block evaluates its pieces, a tile has a prologue and an epilogue whatever it walks.
inline constexpr int64_t kInteriorBlockCost = 1024;
inline constexpr int64_t kEdgeBlockCost = 1300;
inline constexpr int64_t kTileCost = 600;
inline constexpr int64_t kMaxTileCost = INT32_MAX;  // costs only order tiles; saturating keeps a sort key in 64 bits

MAGI_HOST_DEVICE inline int32_t tile_cost(int64_t num_interior_blocks, int64_t num_edge_blocks) {
    if (num_interior_blocks + num_edge_blocks == 0) return 0;
    return static_cast<int32_t>(
        smaller(kInteriorBlockCost * num_interior_blocks + kEdgeBlockCost * num_edge_blocks + kTileCost, kMaxTileCost));
}

struct Columns {
    int32_t begin, end;  // empty when begin >= end
};

// Columns of a tight slice that all its rows see.
MAGI_HOST_DEVICE inline Columns columns_all_rows_see(const Slice& s) {
    return {larger(s.k_start, s.q_end - 1 + s.lo), smaller(s.k_end, s.q_start + s.hi + 1)};
}

}  // namespace magi
