// Two passes over the slices, count then fill; knows nothing of what a kernel does with a piece.
#include "solver/work_list.h"

#include <algorithm>
#include <limits>
#include <string>
#include <tuple>

#include "base/arrays.h"

namespace magi {

namespace {

// The slice with the rows that exist, and the tiles [first_tile, end_tile) they lie in. Every row of a tightened slice sees a key,
// so each of these tiles has exactly one piece of it.
struct TileSpan {
    Slice slice;
    int64_t first_tile = 0, end_tile = 0;
};

std::vector<TileSpan> span_tiles(std::span<const Slice> slices, const TileRows& rows) {
    std::vector<TileSpan> spans;
    for (const Slice& s : slices) {
        Slice inside = clip(s, 0, static_cast<int32_t>(rows.num_rows()), s.k_start, s.k_end);
        if (tighten(inside)) spans.push_back({inside, rows.tile_of(inside.q_start), rows.tile_of(inside.q_end - 1) + 1});
    }
    return spans;
}

}  // namespace

WorkList build_work_list(std::span<const Slice> slices, int64_t total_q, int64_t tile_m) {
    if (tile_m < 1) throw InputError("tile_m=" + std::to_string(tile_m) + " must be at least 1");
    if (total_q < 0 || total_q > kMaxTokens)
        throw InputError("total_q=" + std::to_string(total_q) + " must be from 0 to " + std::to_string(kMaxTokens));
    return build_work_list(slices, TileRows(total_q, tile_m));
}

WorkList build_work_list(std::span<const Slice> slices, const TileRows& rows) {
    const std::vector<TileSpan> spans = span_tiles(slices, rows);
    int64_t num_pieces = 0;
    for (const TileSpan& span : spans) num_pieces += span.end_tile - span.first_tile;
    if (num_pieces > std::numeric_limits<int32_t>::max() / 6)
        throw InputError("tiles of " + std::to_string(rows.tile_rows()) + " rows cut the slices in " + std::to_string(num_pieces) +
                         " pieces; take larger tiles");

    const auto num_tiles = static_cast<size_t>(rows.num_tiles());
    WorkList list;
    list.tile_offsets.assign(num_tiles + 1, 0);
    for (const TileSpan& span : spans)
        for (int64_t tile = span.first_tile; tile < span.end_tile; ++tile) ++list.tile_offsets[static_cast<size_t>(tile) + 1];
    for (size_t tile = 0; tile < num_tiles; ++tile) list.tile_offsets[tile + 1] += list.tile_offsets[tile];

    list.pieces.resize(static_cast<size_t>(num_pieces));
    std::vector<int32_t> next(list.tile_offsets.begin(), list.tile_offsets.end());
    for (const TileSpan& span : spans) {
        for (int64_t tile = span.first_tile; tile < span.end_tile; ++tile) {
            Slice piece = clip(span.slice, rows.begin(tile), rows.end(tile), span.slice.k_start, span.slice.k_end);
            tighten(piece);
            list.pieces[static_cast<size_t>(next[static_cast<size_t>(tile)]++)] = piece;
        }
    }
    const auto is_before = [](const Slice& a, const Slice& b) {
        return std::tie(a.k_start, a.q_start, a.lo) < std::tie(b.k_start, b.q_start, b.lo);
    };
    for (size_t tile = 0; tile < num_tiles; ++tile) {
        const auto begin = list.pieces.begin() + list.tile_offsets[tile], end = list.pieces.begin() + list.tile_offsets[tile + 1];
        // Most are in order, and a stable sort allocates.
        if (!std::is_sorted(begin, end, is_before)) std::stable_sort(begin, end, is_before);
    }
    return list;
}

}  // namespace magi
