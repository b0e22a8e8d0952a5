// Work list of an attention kernel: per tile of query rows, the pieces of slices that it has to visit.
// Plain C++20; knows nothing of ranks, steps or devices.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/slice.h"
#include "solver/tile_rows.h"

namespace magi {

struct WorkList {
    std::vector<int32_t> tile_offsets;  // [num_tiles + 1]; tile t has pieces tile_offsets[t] .. tile_offsets[t + 1]
    std::vector<Slice> pieces;          // tightened, non-empty, ascending k_start inside a tile

    std::span<const Slice> pieces_of(int64_t tile) const {
        const int32_t* ends = tile_offsets.data() + tile;
        return {pieces.data() + ends[0], pieces.data() + ends[1]};
    }
};

// Throws InputError when the number of pieces does not fit 32 bits.
WorkList build_work_list(std::span<const Slice> slices, const TileRows& rows);

// Tile t covers query rows [t * tile_m, (t + 1) * tile_m), the last one up to total_q. Throws InputError when
// tile_m < 1 or the number of pieces does not fit 32 bits.
WorkList build_work_list(std::span<const Slice> slices, int64_t total_q, int64_t tile_m);

}  // namespace magi
