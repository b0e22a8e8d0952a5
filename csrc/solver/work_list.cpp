// Two passes over the slices, count then fill; knows nothing of what a kernel does with a piece.
#include "solver/work_list.h"

#include <algorithm>
#include <limits>
#include <string>
#include <tuple>

#include "base/arrays.h"

namespace magi {

namespace {

// Calls visit(tile, piece) for each non-empty piece.
template <class Visit>
void for_each_piece(std::span<const Slice> slices, int64_t total_q, int64_t tile_m, Visit visit) {
    for (Slice s : slices) {
        if (!tighten(s)) continue;
        const int64_t last_row = std::min<int64_t>(s.q_end, total_q) - 1;
        for (int64_t tile = s.q_start / tile_m; tile <= last_row / tile_m && s.q_start <= last_row; ++tile) {
            const auto first = static_cast<int32_t>(tile * tile_m);
            const auto end = static_cast<int32_t>(std::min(tile * tile_m + tile_m, total_q));
            Slice piece = clip(s, first, end, s.k_start, s.k_end);
            if (tighten(piece)) visit(static_cast<size_t>(tile), piece);
        }
    }
}

}  // namespace

WorkList build_work_list(std::span<const Slice> slices, int64_t total_q, int64_t tile_m) {
    if (tile_m < 1) throw InputError("tile_m=" + std::to_string(tile_m) + " must be at least 1");
    if (total_q < 0) throw InputError("total_q=" + std::to_string(total_q) + " must be at least 0");
    const auto num_tiles = static_cast<size_t>((total_q + tile_m - 1) / tile_m);
    std::vector<int64_t> ends(num_tiles + 1, 0);
    for_each_piece(slices, total_q, tile_m, [&](size_t tile, const Slice&) { ++ends[tile + 1]; });
    for (size_t tile = 0; tile < num_tiles; ++tile) ends[tile + 1] += ends[tile];
    if (ends.back() > std::numeric_limits<int32_t>::max() / 6)
        throw InputError("tile_m=" + std::to_string(tile_m) + " cuts the slices in " + std::to_string(ends.back()) + " pieces; take larger tiles");

    WorkList list;
    list.tile_offsets.assign(ends.begin(), ends.end());
    list.pieces.resize(static_cast<size_t>(ends.back()));
    std::vector<int64_t> next(ends.begin(), ends.end());
    for_each_piece(slices, total_q, tile_m, [&](size_t tile, const Slice& piece) { list.pieces[static_cast<size_t>(next[tile]++)] = piece; });
    for (size_t tile = 0; tile < num_tiles; ++tile)
        std::stable_sort(list.pieces.begin() + ends[tile], list.pieces.begin() + ends[tile + 1],
                         [](const Slice& a, const Slice& b) { return std::tie(a.k_start, a.q_start, a.lo) < std::tie(b.k_start, b.q_start, b.lo); });
    return list;
}

}  // namespace magi
