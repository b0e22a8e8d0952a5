// Two stable sorts of tile ids, and clusters found in one sweep over tiles in row order.
#include "solver/tile_order.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace magi {

namespace {

struct Reach {
    int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;

    bool is_empty() const { return begin >= end; }
    int64_t width() const { return end - begin; }
    Reach with(const Reach& other) const { return {std::min(begin, other.begin), std::max(end, other.end)}; }
    bool overlaps(const Reach& other) const { return begin < other.end && other.begin < end; }
};

Reach reach_of(const TileWork& work, size_t tile) {
    Reach reach;
    for (int32_t idx = work.segment_offsets[tile]; idx < work.segment_offsets[tile + 1]; ++idx) {
        const TileSegment& segment = work.segments[static_cast<size_t>(idx)];
        reach = reach.with({segment.col_begin, segment.col_end});
    }
    return reach;
}

std::vector<int32_t> all_tiles(size_t count) {
    std::vector<int32_t> tiles(count);
    std::iota(tiles.begin(), tiles.end(), 0);
    return tiles;
}

}  // namespace

std::vector<int32_t> order_by_cost(std::span<const int32_t> costs) {
    std::vector<int32_t> order = all_tiles(costs.size());
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return costs[static_cast<size_t>(a)] > costs[static_cast<size_t>(b)]; });
    return order;
}

std::vector<int32_t> order_by_cluster(const TileWork& work) {
    const size_t num_tiles = work.costs.size();
    std::vector<int32_t> cluster_of(num_tiles);
    std::vector<int32_t> heaviest;  // of each cluster
    Reach cluster;
    int64_t widest = 0;
    for (size_t tile = 0; tile < num_tiles; ++tile) {
        const Reach reach = reach_of(work, tile);
        if (reach.is_empty()) {
            cluster_of[tile] = -1;
            continue;
        }
        const Reach joined = cluster.with(reach);
        if (!cluster.overlaps(reach) || joined.width() > 2 * std::max(widest, reach.width())) {
            heaviest.push_back(0);
            cluster = reach;
            widest = reach.width();
        } else {
            cluster = joined;
            widest = std::max(widest, reach.width());
        }
        cluster_of[tile] = static_cast<int32_t>(heaviest.size()) - 1;
        heaviest.back() = std::max(heaviest.back(), work.costs[tile]);
    }
    std::vector<int32_t> rank(heaviest.size());
    const std::vector<int32_t> clusters = order_by_cost(heaviest);
    for (size_t idx = 0; idx < clusters.size(); ++idx) rank[static_cast<size_t>(clusters[idx])] = static_cast<int32_t>(idx);
    const auto rank_of = [&](int32_t tile) {
        const int32_t own = cluster_of[static_cast<size_t>(tile)];
        return own < 0 ? std::numeric_limits<int32_t>::max() : rank[static_cast<size_t>(own)];
    };
    std::vector<int32_t> order = order_by_cost(work.costs);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return rank_of(a) < rank_of(b); });
    return order;
}

}  // namespace magi
