// One entry of range tensors as a tight slice inside the tensors, and where everything lies in the workspace of the device planner.
// Compiled for the device, and by a host compiler for tests. Knows no tile's content and no CUDA.
#pragma once

#include <cstdint>

#include "attention/device_work.h"
#include "attention/tile_segments.h"
#include "base/slice.h"

namespace magi {

struct Range {
    int64_t start, end;
};

// Of idx-th entry of int32 or int64 [n, 2]. Garbage is cut so that differences of two ends cannot overflow.
MAGI_DEVICE inline Range read_range(const void* ranges, int32_t item_bytes, int64_t idx) {
    constexpr int64_t kFar = int64_t{1} << 40;
    int64_t ends[2];
    for (int side = 0; side < 2; ++side) {
        const int64_t at = 2 * idx + side;
        const int64_t value = item_bytes == 8 ? static_cast<const int64_t*>(ranges)[at] : static_cast<const int32_t*>(ranges)[at];
        ends[side] = smaller(larger(value, -kFar), kFar);
    }
    return {ends[0], ends[1]};
}

// The range inside [0, total); sets kRangeOutside when that is not the range itself.
MAGI_DEVICE inline Range inside(const Range& range, int32_t total, int32_t& status) {
    if (range.start < 0 || range.end > total || range.start > range.end) status |= kRangeOutside;
    return {larger<int64_t>(range.start, 0), smaller<int64_t>(range.end, total)};
}

// The table of docs/masks.md. Returns an empty slice for an unknown type.
MAGI_DEVICE inline Slice band_of(const Range& q, const Range& k, int64_t type, const DeviceWorkArgs& args, int32_t& status) {
    const Range q_inside = inside(q, args.total_q, status), k_inside = inside(k, args.total_k, status);
    if (type < 0 || type > 3) status |= kUnknownType;
    if (type < 0 || type > 3 || q_inside.start >= q_inside.end || k_inside.start >= k_inside.end) return Slice{};
    Slice slice{static_cast<int32_t>(q_inside.start), static_cast<int32_t>(q_inside.end), static_cast<int32_t>(k_inside.start),
                static_cast<int32_t>(k_inside.end)};
    if (type >= 2) slice.lo = clamp_bound(k.start - q.start);  // aligned to what was asked for, not to what is inside
    if (type % 2 == 1) slice.hi = clamp_bound(k.end - q.end);
    return slice;
}

// The idx-th slice of the arguments, rows of tiles as queries, tight; empty when it has no cell.
MAGI_DEVICE inline Slice read_slice(const DeviceWorkArgs& args, int64_t idx, int32_t& status) {
    Slice slice;
    if (args.slices != nullptr) {
        const int32_t* fields = args.slices + 6 * idx;
        slice = band_of({fields[0], fields[1]}, {fields[2], fields[3]}, 0, args, status);
        slice.lo = clamp_bound(fields[4]);
        slice.hi = clamp_bound(fields[5]);
    } else {
        int64_t type = 0;
        if (args.types != nullptr)
            type = args.type_bytes == 8 ? static_cast<const int64_t*>(args.types)[idx] : static_cast<const int32_t*>(args.types)[idx];
        slice =
            band_of(read_range(args.q_ranges, args.range_bytes, idx), read_range(args.k_ranges, args.range_bytes, idx), type, args, status);
    }
    if (args.is_transposed) slice = transpose(slice);
    return tighten(slice) ? slice : Slice{};
}

// Places in the workspace, in int32 elements. What comes after `pieces` is scratch of the planner.
struct WorkspacePlan {
    DeviceWorkLayout list;
    int64_t capacity_segments, capacity_pieces;
    int64_t capacity_pool;  // pieces of tiles that have too many for shared memory
    int64_t offset_slices, offset_rows, offset_num_segments, offset_num_pieces, offset_costs, offset_piece_begin, offset_pool_begin;
    int64_t offset_block_status, offset_pool_used, offset_pool;
};

inline constexpr int32_t kHeaderInts = 4;
inline constexpr int32_t kSharedPieces = 256;      // 22 KiB: ten CTAs on a multiprocessor; few tiles have more
inline constexpr int32_t kMaxStatusBlocks = 64;    // CTAs that read slices, each with a status word of its own
inline constexpr int64_t kSpareRecords = 1 << 20;  // of segments and of pieces, beyond four for every slice and tile
inline constexpr int64_t kSparePool = 1 << 18;
inline constexpr int64_t kMaxRecords = 1 << 28;  // of each kind; places are int32

inline WorkspacePlan plan_workspace(const DeviceWorkArgs& args) {
    WorkspacePlan plan{};
    const int64_t num_slices = args.num_slices;
    plan.list.num_rows = args.is_transposed ? args.total_k : args.total_q;
    const int64_t num_tiles = plan.list.num_tiles = (plan.list.num_rows + args.tile_rows - 1) / args.tile_rows;
    // What the mask at most needs (see kMaxSegmentsPerPiece; in doubles, it may be astronomic), or what any sensible one does.
    const auto sensible = [&](int64_t spare) { return smaller(4 * (num_slices + num_tiles) + spare, kMaxRecords); };
    const auto bounded = [](double needed, int64_t limit) {
        return needed < static_cast<double>(limit) ? static_cast<int64_t>(needed) : limit;
    };
    const double touches = static_cast<double>(num_slices) * static_cast<double>(num_tiles);
    plan.capacity_segments = bounded(kMaxSegmentsPerPiece * touches, sensible(kSpareRecords));
    plan.capacity_pieces = bounded((kMaxSegmentsPerPiece - 1) * touches * static_cast<double>(num_slices), sensible(kSpareRecords));
    plan.capacity_pool = num_slices <= kSharedPieces ? 0 : bounded(touches, sensible(kSparePool));

    int64_t next = 0;
    const auto place = [&next](int64_t size) {
        const int64_t at = next;
        next = (next + size + 3) / 4 * 4;  // 16 bytes
        return at;
    };
    place(kHeaderInts);
    plan.list.offset_order = place(num_tiles);
    plan.list.offset_segment_offsets = place(num_tiles + 1);
    plan.list.offset_segments = place(4 * plan.capacity_segments);
    plan.list.offset_pieces = place(6 * plan.capacity_pieces);
    plan.offset_slices = place(6 * num_slices);
    plan.offset_rows = place(2 * num_slices);
    plan.offset_num_segments = place(num_tiles);
    plan.offset_num_pieces = place(num_tiles);
    plan.offset_costs = place(num_tiles);
    plan.offset_piece_begin = place(num_tiles);
    plan.offset_pool_begin = place(num_tiles);
    plan.offset_block_status = place(kMaxStatusBlocks);
    plan.offset_pool_used = place(2);
    plan.offset_pool = place(TileScratch::kIntsPerPiece * plan.capacity_pool);
    plan.list.workspace_size = next;
    return plan;
}

}  // namespace magi
