// The tile work list as a kernel reads it: plain int32 records, made by the host planner or on the device.
// No CUDA, torch or Python header; knows nothing of heads, tensors or how a block is computed.
//
// One list serves one direction. Forward: rows are queries, columns are keys. Backward: rows are keys, columns are queries
// (slices transposed), everything below reads the same.
//
// Tile t owns rows [cuts[t], cuts[t + 1]), at least one and at most tile_rows; a tile may end where a document ends. Without cuts
// these are [t * tile_rows, min((t + 1) * tile_rows, num_rows)). Its pieces are the slices clipped to those rows and tightened.
// Overlapping or touching column ranges of its pieces form a run; a run is cut into blocks of block_cols columns from its first
// column on; the last block may be ragged. A block is interior when every row that the tile has sees every column of the whole
// block; all others are edge blocks. Blocks that follow each other in a run and are alike (interior, or edge with the same
// pieces) make one segment. Segments of a tile: edge segments first, then interior ones, each by column.
#pragma once

#include <cstdint>

namespace magi {

struct WorkSegment {
    int32_t col_begin, col_end;      // blocks start at col_begin + i * block_cols; columns from col_end on are seen by no row of the tile
    int32_t piece_begin, piece_end;  // pieces that touch a block of it; equal for an interior segment
};

// Row i sees column j  <=>  row_begin <= i < row_end, col_begin <= j < col_end, lo <= j - i <= hi. Same layout as Slice.
struct WorkPiece {
    int32_t row_begin, row_end, col_begin, col_end, lo, hi;
};

static_assert(sizeof(WorkSegment) == 16 && sizeof(WorkPiece) == 24, "records are read from int32 arrays");

struct Work {
    const int32_t* order;            // [num_tiles] tile ids by falling cost, ties by id
    const int32_t* near_order;       // [num_tiles] tile ids, those that read the same columns side by side; null: as order
    const int32_t* segment_offsets;  // [num_tiles + 1]
    const WorkSegment* segments;
    const WorkPiece* pieces;
    const int32_t* cuts;  // [num_tiles + 1] first row of each tile, then num_rows; null: tile t owns rows from t * tile_rows on
    int32_t num_tiles;
    int32_t num_rows;   // rows that exist; without cuts all tiles but the last have tile_rows of them
    int32_t tile_rows;  // what the list was made for; a kernel refuses a list made for other tiles
    int32_t block_cols;
};

}  // namespace magi
