// dq of one (query tile, head) per work item, for the deterministic mode: walks the key blocks of the forward's kind of work list, keeps dq
// in registers and adds it once, so that no two CTAs ever add to one number. Scores are computed a third time for it. Knows the work list
// (rows are queries) and tensor maps; nothing of torch, masks as users see them, or steps.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "attention/launch.h"
#include "attention/sm90/block_mask.cuh"
#include "attention/sm90/products.cuh"
#include "attention/sm90/schedule.cuh"
#include "attention/sm90/softmax.cuh"
#include "attention/sm90/tiles.h"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace magi::sm90 {

template <class T_, int kDim_, bool kSoftcap_>
struct DqTraits {
    using T = T_;
    static constexpr int kDim = kDim_;
    static constexpr bool kSoftcap = kSoftcap_;
    static constexpr int kRows = kDqTileRows;
    static constexpr int kCols = kDqBlockCols;
    static constexpr int kGroups = kRows / 64;
    static constexpr int kThreads = 128 * (kGroups + 1);
    static constexpr int kStages = 4;
    static constexpr int kHalves = kDim / 64;
    static constexpr int kLoadRegisters = 40;
    static constexpr int kMathRegisters = 232;
};

template <class Traits>
struct alignas(1024) DqShared {
    typename Traits::T q[Traits::kRows * Traits::kDim];
    typename Traits::T dout[Traits::kRows * Traits::kDim];
    typename Traits::T k[Traits::kStages][Traits::kCols * Traits::kDim];
    typename Traits::T v[Traits::kStages][Traits::kCols * Traits::kDim];
    BlockSlot block[Traits::kStages];
    ItemQueue queue;
    Item item;
    int32_t has_blocks;
    uint64_t q_full, q_empty;
    uint64_t kv_full[Traits::kStages], kv_empty[Traits::kStages];
};

struct DqParams {
    CUtensorMap q, k, v, dout;
    Work work;
    Schedule schedule;
    int32_t total_q, total_k, num_heads_q, heads_per_group;
    float scale_log2, scale_softcap, scale;  // as in BackwardParams
    const float* stats;                      // [num_heads_q, 2, stats_stride], see stats.h
    int64_t stats_stride;
    float* dq;
};

template <class Traits>
__device__ __forceinline__ void load_dq(const DqParams& params, DqShared<Traits>& shared) {
    constexpr int kTileBytes = Traits::kRows * Traits::kDim * 2, kBlockBytes = Traits::kCols * Traits::kDim * 2;
    ptx::Ring<Traits::kStages> ring;
#pragma unroll 1
    for (uint32_t items = 0;; ++items) {
        ptx::mbarrier_wait(&shared.queue.full, items & 1);
        volatile int32_t* record = shared.queue.item;
        ptx::mbarrier_wait(&shared.q_empty, ~items & 1);
        int32_t segment_idx = record[2];
        shared.item = {record[0], record[1], shared.queue.row_end};
        shared.has_blocks = segment_idx < record[3];
        if (segment_idx == record[3]) {
            ptx::mbarrier_arrive(&shared.q_full);
            if (record[0] < 0) return;
            ptx::mbarrier_arrive(&shared.queue.empty);
            continue;
        }
        ptx::mbarrier_arrive_expect(&shared.q_full, 2 * kTileBytes);
        ptx::tma_load(shared.q, &params.q, &shared.q_full, 0, record[0], 0, record[1]);
        ptx::tma_load(shared.dout, &params.dout, &shared.q_full, 0, record[0], 0, record[1]);

        const int32_t kv_head = record[1] / params.heads_per_group;
        int4 segment = shared.queue.first_segment;
#pragma unroll 1
        while (true) {
            const bool is_final = segment_idx + 1 == record[3];
            const int32_t ask_at = is_final ? ItemQueue::ask_at(segment.x, segment.y, Traits::kCols) : -1;
#pragma unroll 1
            for (; segment.x < segment.y; segment.x += Traits::kCols) {
                const bool is_last = is_final && segment.x + Traits::kCols >= segment.y;
                ptx::mbarrier_wait(&shared.kv_empty[ring.stage()], ring.free_parity());
                shared.block[ring.stage()].set(
                    {segment.x, min(segment.y - segment.x, Traits::kCols) | (is_last ? Block::kLast : 0), segment.z, segment.w},
                    params.work.pieces);
                ptx::mbarrier_arrive_expect(&shared.kv_full[ring.stage()], 2 * kBlockBytes);
                ptx::tma_load(shared.k[ring.stage()], &params.k, &shared.kv_full[ring.stage()], 0, segment.x, 0, kv_head);
                ptx::tma_load(shared.v[ring.stage()], &params.v, &shared.kv_full[ring.stage()], 0, segment.x, 0, kv_head);
                ring.advance();
                if (segment.x == ask_at) ptx::mbarrier_arrive(&shared.queue.empty);  // nothing of the record is read after this
            }
            if (is_final) break;
            segment = __ldg(reinterpret_cast<const int4*>(params.work.segments) + ++segment_idx);
        }
    }
}

template <class Traits>
struct DqMath {
    using T = typename Traits::T;
    using Scores = float[Traits::kCols / 2];
    using Sums = float[Traits::kDim / 2];
    static constexpr int kTileHalf = Traits::kRows * 128, kBlockHalf = Traits::kCols * 128;  // bytes of a 64-element column
    static constexpr int kWords = Traits::kCols / 32;

    const DqParams& params;
    DqShared<Traits>& shared;
    const int group, lane, warp;
    ptx::Ring<Traits::kStages> ring;

    __device__ __forceinline__ void release(uint64_t* barrier) {
        __syncwarp();  // the other lanes have read what may be overwritten now
        if (lane == 0) ptx::mbarrier_arrive(barrier);
    }

    __device__ __forceinline__ void issue_rows(Scores& acc, const T* tile, const T* block) {
        ptx::pin(acc);
        ptx::wgmma_fence();
        issue_rows_by_rows<T, Traits::kDim, Traits::kCols>(acc, tile + group * 64 * 64, kTileHalf, block, kBlockHalf);
    }

    // Keys past those that exist: whatever memory holds there must not meet a gradient of 0 as NaN.
    __device__ __forceinline__ void clear_missing(T* rows, const Block& block) {
        const int num_cols = block.num_cols();
        if (num_cols == Traits::kCols || block.col_begin + num_cols >= params.total_k) return;
        clear_rows_from<Traits::kDim, Traits::kCols>(rows, num_cols, 32 * warp + lane);
        ptx::named_sync(2 + group, 128);
    }

    __device__ __forceinline__ bool step(const Item& item, Sums& dq, const float (&lse)[2], const float (&delta)[2]);
    __device__ __forceinline__ void run();
};

template <class Traits>
__device__ __forceinline__ bool DqMath<Traits>::step(const Item& item, Sums& dq, const float (&lse)[2], const float (&delta)[2]) {
    Scores scores, dscores;
    const int stage = ring.stage();
    ptx::mbarrier_wait(&shared.kv_full[stage], ring.parity());
    const Block block = shared.block[stage].block;
    clear_missing(shared.k[stage], block);
    issue_rows(scores, shared.q, shared.k[stage]);
    issue_rows(dscores, shared.dout, shared.v[stage]);
    ColumnBits<2, kWords> bits;
    if (block.is_edge())
        bits = visible_columns<kWords>(params.work.pieces, shared.block[stage], block, item.row_begin + group * 64 + warp * 16, lane);
    ptx::wgmma_wait<1>();
    ptx::pin(scores);
    // Rows that see nothing have lse 0 here, and hidden weights may overflow: all of that is hidden below.
#pragma unroll
    for (int i = 0; i < Traits::kCols / 2; ++i) {
        if constexpr (Traits::kSoftcap) {
            const float capped = tanh_exact(scores[i] * params.scale_softcap);
            scores[i] = ptx::exp2_fast(fmaf(capped, params.scale_log2, -lse[(i / 2) % 2])) * (1.0f - capped * capped);
        } else {
            scores[i] = ptx::exp2_fast(fmaf(scores[i], params.scale_log2, -lse[(i / 2) % 2]));
        }
    }
    ptx::wgmma_wait<0>();
    ptx::pin(dscores);
#pragma unroll
    for (int i = 0; i < Traits::kCols / 2; ++i) dscores[i] = scores[i] * (dscores[i] - delta[(i / 2) % 2]);
    if (block.is_edge()) hide_columns<kWords>(dscores, bits, lane, 0.0f);
    uint32_t packed[Traits::kCols / 4];
#pragma unroll
    for (int i = 0; i < Traits::kCols / 4; ++i) packed[i] = ptx::pack<T>(dscores[2 * i], dscores[2 * i + 1]);
    issue_weights_by_block<T, Traits::kDim>(dq, packed, shared.k[stage], kBlockHalf, true);
    ptx::wgmma_wait<0>();
    ptx::pin(dq);
    release(&shared.kv_empty[stage]);
    ring.advance();
    return ptx::uniform_bool(block.is_last());
}

template <class Traits>
__device__ __forceinline__ void DqMath<Traits>::run() {
    for (uint32_t q_parity = 0;; q_parity ^= 1) {
        ptx::mbarrier_wait(&shared.q_full, q_parity);
        __syncwarp();
        const Item item = {ptx::uniform(shared.item.row_begin), ptx::uniform(shared.item.head), ptx::uniform(shared.item.row_end)};
        const bool has_blocks = ptx::uniform_bool(shared.has_blocks != 0);
        if (item.row_begin < 0) break;
        if (!has_blocks) {
            release(&shared.q_empty);
            continue;
        }
        const int row = item.row_begin + group * 64 + warp * 16 + lane / 4;
        const float* stats = params.stats + 2 * item.head * params.stats_stride;
        float lse[2] = {0, 0}, delta[2] = {0, 0};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (row + 8 * r >= item.row_end) continue;
            lse[r] = __ldg(stats + row + 8 * r) * (Traits::kSoftcap ? -1.0f : -params.scale_log2);
            delta[r] = -__ldg(stats + params.stats_stride + row + 8 * r);
        }
        Sums dq;
#pragma unroll
        for (int i = 0; i < Traits::kDim / 2; ++i) dq[i] = 0;
        __syncwarp();
        while (!step(item, dq, lse, delta)) {
        }
        release(&shared.q_empty);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (row + 8 * r >= item.row_end) continue;
            float* to = params.dq + (static_cast<int64_t>(row + 8 * r) * params.num_heads_q + item.head) * Traits::kDim;
#pragma unroll
            for (int j = 0; j < Traits::kDim / 8; ++j) {
                float2* pair = reinterpret_cast<float2*>(to + 8 * j + 2 * (lane % 4));
                float2 value = *pair;
                value.x += dq[4 * j + 2 * r] * params.scale;
                value.y += dq[4 * j + 2 * r + 1] * params.scale;
                *pair = value;
            }
        }
    }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) dq_kernel(const __grid_constant__ DqParams params) {
    extern __shared__ __align__(1024) char raw[];  // addresses known to the compiler; aligned, for the swizzle
    auto& shared = *reinterpret_cast<DqShared<Traits>*>(raw);
    const int group = ptx::uniform(static_cast<int>(threadIdx.x / 128));
    if (threadIdx.x == 0) {
        constexpr int kWarps = 4 * Traits::kGroups;
        shared.queue.init();
        ptx::mbarrier_init(&shared.q_full, 1);
        ptx::mbarrier_init(&shared.q_empty, kWarps);
        for (int stage = 0; stage < Traits::kStages; ++stage) {
            ptx::mbarrier_init(&shared.kv_full[stage], 1);
            ptx::mbarrier_init(&shared.kv_empty[stage], kWarps);
        }
        ptx::fence_barrier_init();
    }
    __syncthreads();
    if (group == 0) {
        ptx::lower_registers<Traits::kLoadRegisters>();
        if (threadIdx.x == 0) load_dq<Traits>(params, shared);
        if (threadIdx.x == 32) take_items(params.schedule, params.work, shared.queue);
    } else {
        ptx::raise_registers<Traits::kMathRegisters>();
        DqMath<Traits> math{params, shared, group - 1, static_cast<int>(threadIdx.x % 32), static_cast<int>(threadIdx.x % 128 / 32), {}};
        math.run();
    }
}

}  // namespace magi::sm90
