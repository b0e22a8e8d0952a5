// The list a compiled attention kernel walks: per tile of rows, segments of column blocks and the pieces that mask them.
// csrc/attention/work.h says what each record means. Plain C++20; knows nothing of ranks, steps, heads or devices.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/slice.h"

namespace magi {

// WorkSegment of csrc/attention/work.h, field by field.
struct TileSegment {
    int32_t col_begin, col_end;
    int32_t piece_begin, piece_end;
};

struct TileWork {
    std::vector<int32_t> order;            // [num_tiles] by falling cost, ties by id; tiles without work last
    std::vector<int32_t> near_order;       // [num_tiles] tiles that read the same columns side by side; empty where that is `order`
    std::vector<int32_t> segment_offsets;  // [num_tiles + 1]
    std::vector<TileSegment> segments;
    std::vector<Slice> pieces;   // WorkPiece: rows of the tile are the queries of the slice
    std::vector<int32_t> costs;  // [num_tiles], see base/tile_cost.h
    std::vector<int32_t> cuts;   // [num_tiles + 1] first row of each tile, then num_rows; empty: tile t begins at row t * tile_rows
};

struct TileShape {
    int64_t tile_rows, block_cols;
};

// Throws InputError for sizes out of range.
void check_sizes(int64_t num_rows, TileShape shape);

// Rows are queries; with is_transposed rows are keys (the backward pass). Time and memory follow the records of the result.
// cuts as TileWork has them; fitted_tiles.h makes some. Throws InputError when a size is out of range, cuts are no tiles of so many rows,
// or the list does not fit 32-bit offsets.
TileWork build_tile_work(std::span<const Slice> slices, int64_t num_rows, TileShape shape, bool is_transposed,
                         std::span<const int32_t> cuts = {});

std::vector<Slice> transposed(std::span<const Slice> slices);

int64_t total_cost(const TileWork& work);

// total_cost of the list without cuts, in less time. Rows are queries.
int64_t uniform_cost(std::span<const Slice> slices, int64_t num_rows, TileShape shape);

// The list as one int32 array, so that it is uploaded by one copy.
//   [0] 0: complete (a list built on a device writes its status here)   [1] num_segments   [2] num_pieces   [3] 0
// then order, segment_offsets, near_order and cuts (where there are any), segments (aligned to 4), pieces at the given places.
struct PackedTileWork {
    static constexpr int64_t kNone = -1;
    std::vector<int32_t> values;
    int64_t offset_order = 0, offset_segment_offsets = 0, offset_near_order = kNone, offset_cuts = kNone, offset_segments = 0,
            offset_pieces = 0;
};

PackedTileWork pack(const TileWork& work);

}  // namespace magi
