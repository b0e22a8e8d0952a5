// The loading side of the backward kernel, and what both sides share: tile sizes, shared memory, parameters. No arithmetic on data here.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "attention/launch.h"
#include "attention/sm90/block_mask.cuh"
#include "attention/sm90/schedule.cuh"
#include "attention/sm90/tiles.h"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"

namespace magi::sm90 {

template <class T_, int kDim_, bool kSoftcap_, bool kWantsDq_>
struct BackwardTraits {
    using T = T_;
    static constexpr int kDim = kDim_;
    static constexpr bool kSoftcap = kSoftcap_;
    static constexpr bool kWantsDq = kWantsDq_;                    // false: only dk and dv, dq has a kernel of its own
    static constexpr int kRows = kBackwardTileRows;                // keys
    static constexpr int kCols = kBackwardBlockCols;               // queries
    static constexpr int kStatsCols = (kCols + 4 + 31) / 32 * 32;  // copies start at multiples of 4 floats and of 128 bytes
    static constexpr int kGroups = kRows / 64;
    static constexpr int kThreads = 128 * (kGroups + 1);
    static constexpr int kStages = 2;
    static constexpr int kHalves = kDim / 64;
    static constexpr int kDqCols = kDim / 2;  // each of the two warpgroups makes half of the columns of dq
    static constexpr int kLoadRegisters = 40;
    static constexpr int kMathRegisters = 232;
    static_assert(kGroups == 2 && kCols == 64);
    static_assert(kStages == 2);  // add_dq tells the round of its buffer by the stage
};

template <class Traits>
struct alignas(1024) BackwardShared {
    typename Traits::T k[Traits::kRows * Traits::kDim];
    typename Traits::T v[Traits::kRows * Traits::kDim];
    typename Traits::T q[Traits::kStages][Traits::kCols * Traits::kDim];
    typename Traits::T dout[Traits::kStages][Traits::kCols * Traits::kDim];
    typename Traits::T dscores[2][Traits::kRows * Traits::kCols];      // two rounds: a warpgroup may write the next while the other reads
    float dq[Traits::kGroups][2][64 * 32];                             // per warpgroup, two boxes of 32 columns
    alignas(128) float stats[Traits::kStages][2][Traits::kStatsCols];  // see stats.h
    BlockSlot block[Traits::kStages];
    ItemQueue queue;
    Item item;  // its head is the kv head
    int32_t has_blocks, next_parity;
    int32_t piece_begin, piece_end;  // pieces of a tile without interior blocks, which may have rows that nobody sees
    int32_t num_items, segment_idx;  // of the loading thread, which has no registers for them
    uint64_t kv_full, kv_empty;
    uint64_t q_full[Traits::kStages], q_empty[Traits::kStages];
    uint64_t dout_full[Traits::kStages], dout_empty[Traits::kStages];
    uint64_t dq_full[Traits::kGroups], dq_empty[Traits::kGroups];
    int2 dq_at[Traits::kGroups];  // first query and head of what dq holds; head < 0: nothing more
};

struct BackwardParams {
    CUtensorMap q, k, v, dout, stats, dq;
    Work work;
    Schedule schedule;
    int32_t total_q, total_k, num_heads_kv;
    int32_t heads_per_item, head_splits;  // query heads that an item walks; items that add to the same keys
    float scale_log2;                     // scale * log2(e), or softcap * log2(e)
    float scale_softcap;                  // scale / softcap
    float scale;                          // of dq and dk
    void* dk;
    void* dv;
    int32_t dkv_is_fp32, accumulate_dkv;
};

// One thread walks heads of the group, segments and blocks, and keeps the rings full. It has few registers: what the inner loop does not
// need stays in shared memory.
template <class Traits>
__device__ __forceinline__ void load_backward(const BackwardParams& params, BackwardShared<Traits>& shared) {
    constexpr int kTileBytes = Traits::kRows * Traits::kDim * 2;
    constexpr int kBlockBytes = Traits::kCols * Traits::kDim * 2;
    constexpr int kStatsBytes = 2 * Traits::kStatsCols * 4;
    ptx::Ring<Traits::kStages> ring;
    volatile int32_t* record = shared.queue.item;
    volatile int32_t* items = &shared.num_items;
    volatile int32_t* segment_idx = &shared.segment_idx;
    *items = 0;
#pragma unroll 1
    while (true) {
        ptx::mbarrier_wait(&shared.queue.full, *items & 1);
        ptx::mbarrier_wait(&shared.kv_empty, ~*items & 1);
        *items = *items + 1;
        shared.next_parity = *items & 1;
        shared.item = {record[0], record[1] / params.head_splits, shared.queue.row_end};
        shared.has_blocks = record[2] < record[3];
        if (record[2] == record[3]) {
            ptx::mbarrier_arrive(&shared.kv_full);
            if (record[0] < 0) return;
            ptx::mbarrier_arrive(&shared.queue.empty);
            continue;
        }
        {
            // Edge segments come first and list their pieces one after another; an interior one is seen by every row.
            const int2 last = __ldg(reinterpret_cast<const int2*>(params.work.segments + record[3]) - 1);
            shared.piece_begin = shared.queue.first_segment.z;
            shared.piece_end = last.x == last.y ? shared.piece_begin : last.y;
        }
        ptx::mbarrier_arrive_expect(&shared.kv_full, 2 * kTileBytes);
        ptx::tma_load(shared.k, &params.k, &shared.kv_full, 0, record[0], 0, shared.item.head);
        ptx::tma_load(shared.v, &params.v, &shared.kv_full, 0, record[0], 0, shared.item.head);

        int32_t head = record[1] * params.heads_per_item;
        *segment_idx = record[2];
        int4 segment = shared.queue.first_segment;
#pragma unroll 1
        while (true) {
            // In the last segment of the item, and only there, the column at which to ask for the next item.
            int32_t ask_at = -1;
            if (*segment_idx + 1 == record[3] && head + 1 == (record[1] + 1) * params.heads_per_item)
                ask_at = ItemQueue::ask_at(segment.x, segment.y, Traits::kCols);
#pragma unroll 1
            for (; segment.x < segment.y; segment.x += Traits::kCols) {
                int32_t flags = min(segment.y - segment.x, Traits::kCols) | static_cast<int32_t>(static_cast<uint32_t>(head) << 16);
                if (ask_at >= 0 && segment.x + Traits::kCols >= segment.y) flags |= Block::kLast;
                flags |= (segment.x & 3) << Block::kStartBits;
                if (segment.z != segment.w) flags |= Block::kEdge;
                if (shared.item.row_end - shared.item.row_begin < Traits::kRows) flags |= Block::kShort;
                ptx::mbarrier_wait(&shared.q_empty[ring.stage()], ring.free_parity());
                shared.block[ring.stage()].set({segment.x, flags, segment.z, segment.w}, params.work.pieces);
                ptx::mbarrier_arrive_expect(&shared.q_full[ring.stage()], kBlockBytes + kStatsBytes);
                ptx::tma_load(shared.q[ring.stage()], &params.q, &shared.q_full[ring.stage()], 0, segment.x, 0, head);
                ptx::tma_load(shared.stats[ring.stage()], &params.stats, &shared.q_full[ring.stage()], segment.x & ~3, 0, 0, head);
                ptx::mbarrier_wait(&shared.dout_empty[ring.stage()], ring.free_parity());
                ptx::mbarrier_arrive_expect(&shared.dout_full[ring.stage()], kBlockBytes);
                ptx::tma_load(shared.dout[ring.stage()], &params.dout, &shared.dout_full[ring.stage()], 0, segment.x, 0, head);
                ring.advance();
                if (segment.x == ask_at) ptx::mbarrier_arrive(&shared.queue.empty);  // nothing of the record is read after this
            }
            if (ask_at >= 0) break;
            *segment_idx = *segment_idx + 1;
            if (*segment_idx == record[3]) {
                *segment_idx = record[2];
                ++head;
            }
            segment = __ldg(reinterpret_cast<const int4*>(params.work.segments) + *segment_idx);
        }
    }
}

// One thread per multiplying warpgroup: adds its half of the columns of dq to global memory, block by block.
template <class Traits>
__device__ __forceinline__ void add_dq_blocks(const BackwardParams& params, BackwardShared<Traits>& shared, int group) {
#pragma unroll 1
    for (uint32_t parity = 0;; parity ^= 1) {
        ptx::mbarrier_wait(&shared.dq_full[group], parity);
        const int2 at = shared.dq_at[group];
        if (at.y < 0) break;
        ptx::tma_reduce_add(&params.dq, shared.dq[group], 0, at.x, Traits::kDqCols / 32 * group, at.y);
        ptx::tma_commit();
        ptx::tma_wait_read<0>();
        ptx::mbarrier_arrive(&shared.dq_empty[group]);
    }
    ptx::tma_wait<0>();
}

}  // namespace magi::sm90
