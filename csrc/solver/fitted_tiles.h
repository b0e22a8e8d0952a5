// Tiles that begin and end where documents do, where that saves blocks of columns.
// Plain C++20; knows nothing of ranks, heads, devices or how a list is packed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/slice.h"
#include "solver/tile_work.h"

namespace magi {

// First row of each tile, then num_rows. Rows are queries. Throws InputError for sizes out of range.
// From the first row on, a window of tile_rows rows is a tile, unless the last border of slices inside it is the better end: the rows
// before it as a tile, and of the tile that begins there the share of the rows left in the window, cost no more, or at most one block
// more where the window ends at no border itself.
std::vector<int32_t> fitted_cuts(std::span<const Slice> slices, int64_t num_rows, TileShape shape);

// The list with fitted tiles where it costs less than the one of build_tile_work (base/tile_cost.h), else that one, without cuts.
// Throws as build_tile_work does.
TileWork build_fitted_work(std::span<const Slice> slices, int64_t num_rows, TileShape shape, bool is_transposed);

}  // namespace magi
