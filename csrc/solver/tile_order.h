// In which order tiles of a work list are begun. Plain C++20; knows nothing of heads, devices or how a list is packed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "solver/tile_work.h"

namespace magi {

// Tile ids by falling cost, ties by id: the last ones are short, and all multiprocessors end together.
std::vector<int32_t> order_by_cost(std::span<const int32_t> costs);

// Tile ids so that tiles which read the same columns are begun one after another and find them in the cache. Neighbours in row order form a
// cluster while their columns overlap and all of them together reach no further than twice the widest reach of one tile. Clusters by the
// falling cost of their heaviest tile, tiles of a cluster by falling cost, ties by id; tiles without work last.
// One document is one cluster, so that this is order_by_cost; packed documents are clusters of their own.
std::vector<int32_t> order_by_cluster(const TileWork& work);

}  // namespace magi
