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
    std::vector<int32_t> segment_offsets;  // [num_tiles + 1]
    std::vector<TileSegment> segments;
    std::vector<Slice> pieces;   // WorkPiece: rows of the tile are the queries of the slice
    std::vector<int32_t> costs;  // [num_tiles], see base/tile_cost.h
};

struct TileShape {
    int64_t tile_rows, block_cols;
};

// Rows are queries; with is_transposed rows are keys (the backward pass). Time and memory follow the records of the result.
// Throws InputError when a size is out of range or the list does not fit 32-bit offsets.
TileWork build_tile_work(std::span<const Slice> slices, int64_t num_rows, TileShape shape, bool is_transposed);

// The list as one int32 array, so that it is uploaded by one copy.
//   [0] 0: complete (a list built on a device writes its status here)   [1] num_segments   [2] num_pieces   [3] 0
// then order, segment_offsets, segments (aligned to 4), pieces at the given places.
struct PackedTileWork {
    std::vector<int32_t> values;
    int64_t offset_order = 0, offset_segment_offsets = 0, offset_segments = 0, offset_pieces = 0;
};

PackedTileWork pack(const TileWork& work);

}  // namespace magi
