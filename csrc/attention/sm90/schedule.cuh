// Which work item (tile, head) a CTA takes next: heaviest tiles first, heads that share keys side by side. Knows nothing of what is
// computed.
#pragma once

#include <cstdint>

#include "attention/work.h"
#include "ptx/barrier.cuh"

namespace magi {

// Items run section by section: as many groups of heads together as keep their keys and values in the L2 cache; inside a section
// tiles that read the same columns side by side, in the last section by falling cost, so that all multiprocessors end together; inside a
// tile all heads of the section, so that heads of one group read the same keys at the same time.
struct Schedule {
    int32_t num_heads;          // heads that items are made of
    int32_t heads_per_section;  // a multiple of the heads that share keys
    int32_t num_items;          // num_tiles * num_heads
    int32_t* counter;           // items taken beyond the first one of every CTA, starts at 0
};

// What a CTA works on: rows of a tile, of one head.
struct Item {
    int32_t row_begin;  // < 0: no more work
    int32_t head;
    int32_t row_end;
};

struct TileHead {
    int32_t tile, head;
};

__device__ __forceinline__ TileHead tile_head_at(const Schedule& schedule, const Work& work, int32_t index) {
    const int32_t full = work.num_tiles * schedule.heads_per_section;
    const int32_t section = index / full;
    const int32_t first_head = section * schedule.heads_per_section;
    const int32_t heads = min(schedule.heads_per_section, schedule.num_heads - first_head);
    const int32_t within = index - section * full;
    const int32_t rank = within / heads;
    const bool is_last = first_head + schedule.heads_per_section >= schedule.num_heads;
    const int32_t* order = is_last || work.near_order == nullptr ? work.order : work.near_order;
    return {__ldg(order + rank), first_head + within - rank * heads};
}

// The next item on its way from the thread that takes it to the thread that loads it. Looking an item up is a chain of four reads of global
// memory, so it is asked for a few blocks before the present one ends; no earlier, or heavy items would be bound to a CTA long before it
// can begin them.
struct ItemQueue {
    alignas(16) int32_t item[4];  // first row of the tile (< 0: no more), head, first segment, end of segments
    int32_t row_end;              // of the tile
    int4 first_segment;           // the record itself
    uint64_t full, empty;

    __device__ __forceinline__ void init() {
        ptx::mbarrier_init(&full, 1);
        ptx::mbarrier_init(&empty, 1);
    }

    // First column of the block of the last segment at which to ask for the next item.
    static __device__ __forceinline__ int32_t ask_at(int32_t col_begin, int32_t col_end, int32_t block_cols) {
        constexpr int32_t kBlocksAhead = 4;
        const int32_t blocks = (col_end - col_begin + block_cols - 1) / block_cols;
        return col_begin + max(blocks - kBlocksAhead, 0) * block_cols;
    }
};

// One thread of its own warp.
__device__ __forceinline__ void take_items(const Schedule& schedule, const Work& work, ItemQueue& queue) {
#pragma unroll 1
    for (uint32_t taken = 0;; ++taken) {
        ptx::mbarrier_wait(&queue.empty, ~taken & 1);
        const int32_t index =
            taken == 0 ? static_cast<int32_t>(blockIdx.x) : static_cast<int32_t>(gridDim.x) + atomicAdd(schedule.counter, 1);
        int4 record = {-1, 0, 0, 0};
        if (index < schedule.num_items) {
            const auto [tile, head] = tile_head_at(schedule, work, index);
            record = {tile * work.tile_rows, head, __ldg(work.segment_offsets + tile), __ldg(work.segment_offsets + tile + 1)};
            queue.row_end = min(record.x + work.tile_rows, work.num_rows);
            if (work.cuts != nullptr) {
                record.x = __ldg(work.cuts + tile);
                queue.row_end = __ldg(work.cuts + tile + 1);
            }
            if (record.z < record.w) queue.first_segment = __ldg(reinterpret_cast<const int4*>(work.segments) + record.z);
        }
        *reinterpret_cast<int4*>(queue.item) = record;
        ptx::mbarrier_arrive(&queue.full);
        if (record.x < 0) return;
    }
}

}  // namespace magi
