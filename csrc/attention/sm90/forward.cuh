// Forward attention of one (query tile, head) per work item: online softmax over all blocks that touch the tile, out written once.
// Knows the work list and tensor maps; nothing of torch, masks as users see them, or steps.
//
// Roles: warpgroup 0 loads (one thread: TMA for Q, K, V; it also walks the work list and describes each block in shared memory), the others
// multiply, 64 rows each. Inside a multiplying warpgroup the scores of block j + 1 are issued before the softmax of block j is used, and
// the warpgroups take turns at the tensor cores (ping-pong), so that one computes exponentials while another multiplies. Softmax without a
// second pass: Milakov and Gimelshein, arXiv:1805.02867; tiling: Dao et al., arXiv:2205.14135, Shah et al., arXiv:2407.08608.
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

template <class T_, int kDim_, bool kSoftcap_, int kCols_>
struct ForwardTraits {
    using T = T_;
    static constexpr int kDim = kDim_;
    static constexpr bool kSoftcap = kSoftcap_;
    static constexpr int kRows = kForwardTileRows;
    static constexpr int kCols = kCols_;
    static constexpr int kGroups = kRows / 64;  // multiplying warpgroups
    static constexpr int kThreads = 128 * (kGroups + 1);
    static constexpr int kStages = 2;
    static constexpr int kTiles = kCols <= 128 ? 2 : 1;  // of queries: the next one is loaded early where there is room for it
    static constexpr int kHalves = kDim / 64;            // 128-byte wide columns of a row
    static constexpr int kLoadRegisters = 40;
    static constexpr int kMathRegisters = 232;
};

template <class Traits>
struct alignas(1024) ForwardShared {
    typename Traits::T q[Traits::kTiles][Traits::kRows * Traits::kDim];
    typename Traits::T k[Traits::kStages][Traits::kCols * Traits::kDim];
    typename Traits::T v[Traits::kStages][Traits::kCols * Traits::kDim];
    typename Traits::T out[Traits::kRows * Traits::kDim];
    BlockSlot block[Traits::kStages];
    ItemQueue queue;
    Item item[Traits::kTiles];  // row_begin < 0: no more work
    int32_t has_blocks[Traits::kTiles];
    uint64_t q_full[Traits::kTiles], q_empty[Traits::kTiles];
    uint64_t k_full[Traits::kStages], k_empty[Traits::kStages];
    uint64_t v_full[Traits::kStages], v_empty[Traits::kStages];
};

struct ForwardParams {
    CUtensorMap q, k, v, out;
    Work work;
    Schedule schedule;
    int32_t total_q, total_k, num_heads_q, heads_per_group;
    float scale_log2;     // of the scores as they enter the softmax: scale * log2(e), or softcap * log2(e)
    float scale_softcap;  // scale / softcap
    float scale_natural;  // scale, or softcap: raw maximum to logit
    void* out_rows;       // for fp32 output, and accumulate
    int32_t out_is_fp32, accumulate;
    float* lse;
    const float* sink_lse;
    int64_t sink_token_stride;
    float* max_logits;
};

// One thread walks segments and blocks, and keeps the rings full. It has few registers: what the inner loop does not need stays in shared
// memory.
template <class Traits>
__device__ __forceinline__ void load_forward(const ForwardParams& params, ForwardShared<Traits>& shared) {
    constexpr int kBlockBytes = Traits::kCols * Traits::kDim * 2;
    ptx::Ring<Traits::kStages> ring;
#pragma unroll 1
    for (ptx::Ring<Traits::kTiles> tiles;; tiles.advance()) {
        ptx::mbarrier_wait(&shared.queue.full, tiles.moved & 1);
        volatile int32_t* record = shared.queue.item;
        const int tile = tiles.stage();
        ptx::mbarrier_wait(&shared.q_empty[tile], tiles.free_parity());
        int32_t segment_idx = record[2];
        shared.item[tile] = {record[0], record[1], shared.queue.row_end};
        shared.has_blocks[tile] = segment_idx < record[3];
        if (segment_idx == record[3]) {
            ptx::mbarrier_arrive(&shared.q_full[tile]);
            if (record[0] < 0) return;
            ptx::mbarrier_arrive(&shared.queue.empty);
            continue;
        }
        ptx::mbarrier_arrive_expect(&shared.q_full[tile], Traits::kRows * Traits::kDim * 2);
        ptx::tma_load(shared.q[tile], &params.q, &shared.q_full[tile], 0, record[0], 0, record[1]);

        const int32_t kv_head = record[1] / params.heads_per_group;
        int4 segment = shared.queue.first_segment;
#pragma unroll 1
        while (true) {
            const bool is_final = segment_idx + 1 == record[3];
            const int32_t ask_at = is_final ? ItemQueue::ask_at(segment.x, segment.y, Traits::kCols) : -1;
#pragma unroll 1
            for (; segment.x < segment.y; segment.x += Traits::kCols) {
                const bool is_last = is_final && segment.x + Traits::kCols >= segment.y;
                ptx::mbarrier_wait(&shared.k_empty[ring.stage()], ring.free_parity());
                shared.block[ring.stage()].set(
                    {segment.x, min(segment.y - segment.x, Traits::kCols) | (is_last ? Block::kLast : 0), segment.z, segment.w},
                    params.work.pieces);
                ptx::mbarrier_arrive_expect(&shared.k_full[ring.stage()], kBlockBytes);
                ptx::tma_load(shared.k[ring.stage()], &params.k, &shared.k_full[ring.stage()], 0, segment.x, 0, kv_head);
                ptx::mbarrier_wait(&shared.v_empty[ring.stage()], ring.free_parity());
                ptx::mbarrier_arrive_expect(&shared.v_full[ring.stage()], kBlockBytes);
                ptx::tma_load(shared.v[ring.stage()], &params.v, &shared.v_full[ring.stage()], 0, segment.x, 0, kv_head);
                ring.advance();
                if (segment.x == ask_at) ptx::mbarrier_arrive(&shared.queue.empty);  // nothing of the record is read after this
            }
            if (is_final) break;
            segment = __ldg(reinterpret_cast<const int4*>(params.work.segments) + ++segment_idx);
        }
    }
}

// The multiplying side of one warpgroup.
template <class Traits>
struct ForwardMath {
    using T = typename Traits::T;
    static constexpr int kHalfBytes = Traits::kCols * 128;
    static constexpr int kWords = Traits::kCols / 32;
    static constexpr int kScores = Traits::kCols / 2;
    static constexpr int kOut = Traits::kDim / 2;

    const ForwardParams& params;
    ForwardShared<Traits>& shared;
    const int group, lane, warp;  // warp of the warpgroup
    ptx::Ring<Traits::kStages> ring;
    int tile;  // where the queries of the item are

    // Warpgroups issue their matrix products in turns; barriers 1 .. kGroups.
    __device__ __forceinline__ void wait_for_turn() { ptx::named_sync(1 + group, 128 * Traits::kGroups); }
    __device__ __forceinline__ void pass_turn() {
#pragma unroll
        for (int other = 1; other < Traits::kGroups; ++other)
            ptx::named_arrive(1 + (group + other) % Traits::kGroups, 128 * Traits::kGroups);
    }
    __device__ __forceinline__ void sync_group() { ptx::named_sync(8 + group, 128); }
    __device__ __forceinline__ bool is_leader() const { return warp == 0 && lane == 0; }
    // One arrival per warp.
    __device__ __forceinline__ void release(uint64_t* barrier) {
        __syncwarp();  // the other lanes have read what may be overwritten now
        if (lane == 0) ptx::mbarrier_arrive(barrier);
    }

    __device__ __forceinline__ void issue_scores(float (&scores)[kScores], int stage) {
        ptx::pin(scores);
        ptx::wgmma_fence();
        issue_rows_by_rows<T, Traits::kDim, Traits::kCols>(scores, shared.q[tile] + group * 64 * 64, Traits::kRows * 128, shared.k[stage],
                                                           kHalfBytes);
    }

    __device__ __forceinline__ void issue_values(float (&out)[kOut], uint32_t (&weights)[kScores / 2], int stage, bool accumulate) {
        issue_weights_by_block<T, Traits::kDim>(out, weights, shared.v[stage], kHalfBytes, accumulate);
    }

    // Rows of the value block past the columns that exist hold whatever memory held, and 0 * NaN is NaN. Both warpgroups write the same
    // zeros.
    __device__ __forceinline__ void clear_missing_values(const Block& block, int stage) {
        const int num_cols = block.num_cols();
        if (num_cols == Traits::kCols || block.col_begin + num_cols >= params.total_k) return;
        clear_rows_from<Traits::kDim, Traits::kCols>(shared.v[stage], num_cols, 32 * warp + lane);
        sync_group();
    }

    __device__ __forceinline__ void cap_scores(float (&scores)[kScores]) {
        if constexpr (Traits::kSoftcap) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) scores[i] = tanh_exact(scores[i] * params.scale_softcap);
        }
    }

    __device__ __forceinline__ void pack_weights(uint32_t (&weights)[kScores / 2], const float (&scores)[kScores]) {
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) weights[i] = ptx::pack<T>(scores[2 * i], scores[2 * i + 1]);
    }

    // What one block hands to the next.
    struct Pass {
        float scores[kScores];
        uint32_t weights[kScores / 2];
        Block block;
        int warp_row;
        bool is_first;
    };

    __device__ __forceinline__ void run();
    template <bool kIsEdge>
    __device__ __forceinline__ void step(Pass& pass, float (&out)[kOut], SoftmaxRows& rows, const Block& block);
    __device__ __forceinline__ void attend(const Item& item, float (&out)[kOut], SoftmaxRows& rows);
    __device__ __forceinline__ void finish(const Item& item, float (&out)[kOut], SoftmaxRows& rows);
    __device__ __forceinline__ void finish_empty(const Item& item);
    __device__ __forceinline__ void store_fp32(const Item& item, const float (&out)[kOut], int row, const float (&keep)[2]);
    __device__ __forceinline__ void store_through_shared(const Item& item, const float (&out)[kOut]);
    __device__ __forceinline__ void store_rows(const Item& item, int first);
};

// One block after the first: its scores beside the values of the block before. Interior blocks run no masking code.
template <class Traits>
template <bool kIsEdge>
__device__ __forceinline__ void ForwardMath<Traits>::step(Pass& pass, float (&out)[kOut], SoftmaxRows& rows, const Block& block) {
    const ptx::Ring<Traits::kStages> previous = ring.previous();
    wait_for_turn();
    issue_scores(pass.scores, ring.stage());
    ptx::mbarrier_wait(&shared.v_full[previous.stage()], previous.parity());
    clear_missing_values(pass.block, previous.stage());
    issue_values(out, pass.weights, previous.stage(), !pass.is_first);
    pass.is_first = false;
    pass_turn();
    ColumnBits<2, kWords> bits;
    if constexpr (kIsEdge) bits = visible_columns<kWords>(params.work.pieces, shared.block[ring.stage()], block, pass.warp_row, lane);
    ptx::wgmma_wait<1>();
    ptx::pin(pass.scores);
    release(&shared.k_empty[ring.stage()]);
    cap_scores(pass.scores);
    if constexpr (kIsEdge) hide_columns<kWords>(pass.scores, bits, lane, -INFINITY);
    float rescale[2];
    rows.update(pass.scores, params.scale_log2, rescale);
    ptx::wgmma_wait<0>();
    ptx::pin(out);
    release(&shared.v_empty[previous.stage()]);
    pack_weights(pass.weights, pass.scores);
#pragma unroll
    for (int i = 0; i < kOut; ++i) out[i] *= rescale[(i / 2) % 2];
}

template <class Traits>
__device__ __forceinline__ void ForwardMath<Traits>::attend(const Item& item, float (&out)[kOut], SoftmaxRows& rows) {
    Pass pass;
    pass.warp_row = item.row_begin + group * 64 + warp * 16;
    ptx::mbarrier_wait(&shared.k_full[ring.stage()], ring.parity());
    pass.block = shared.block[ring.stage()].block;
    wait_for_turn();
    issue_scores(pass.scores, ring.stage());
    pass_turn();
    ColumnBits<2, kWords> bits;
    if (pass.block.is_edge())
        bits = visible_columns<kWords>(params.work.pieces, shared.block[ring.stage()], pass.block, pass.warp_row, lane);
    ptx::wgmma_wait<0>();
    ptx::pin(pass.scores);
    release(&shared.k_empty[ring.stage()]);
    cap_scores(pass.scores);
    if (pass.block.is_edge()) hide_columns<kWords>(pass.scores, bits, lane, -INFINITY);
    float rescale[2];
    rows.update(pass.scores, params.scale_log2, rescale);
    pack_weights(pass.weights, pass.scores);

    pass.is_first = true;
    while (!ptx::uniform_bool(pass.block.is_last())) {
        ring.advance();
        ptx::mbarrier_wait(&shared.k_full[ring.stage()], ring.parity());
        const Block block = shared.block[ring.stage()].block;
        if (ptx::uniform_bool(block.is_edge()))
            step<true>(pass, out, rows, block);
        else
            step<false>(pass, out, rows, block);
        pass.block = block;
    }
    release(&shared.q_empty[tile]);
    ptx::mbarrier_wait(&shared.v_full[ring.stage()], ring.parity());
    clear_missing_values(pass.block, ring.stage());
    issue_values(out, pass.weights, ring.stage(), !pass.is_first);
    ptx::wgmma_wait<0>();
    ptx::pin(out);
    release(&shared.v_empty[ring.stage()]);
    ring.advance();
}

// Normalise, join the sink or what out already holds, write out and lse.
template <class Traits>
__device__ __forceinline__ void ForwardMath<Traits>::finish(const Item& item, float (&out)[kOut], SoftmaxRows& rows) {
    rows.join_quad();
    const int row = item.row_begin + group * 64 + warp * 16 + lane / 4;
    if (params.max_logits != nullptr) rows.raise_maximum(params.max_logits + item.head, params.scale_natural, lane, row, item.row_end);
    float factor[2], keep[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = row + 8 * r;
        const bool exists = i < item.row_end;
        float* lse = params.lse + static_cast<int64_t>(i) * params.num_heads_q + item.head;
        float other = -INFINITY;
        if (params.accumulate && exists) other = *lse;
        if (params.sink_lse != nullptr && exists) other = params.sink_lse[i * params.sink_token_stride + item.head];
        const float total = rows.join(r, params.scale_log2, other, factor[r], keep[r]);
        __syncwarp();  // all four lanes of a row have read what one of them replaces
        if (exists && lane % 4 == 0) *lse = total;
    }
#pragma unroll
    for (int i = 0; i < kOut; ++i) out[i] = factor[(i / 2) % 2] == 0 ? 0.0f : out[i] * factor[(i / 2) % 2];  // 0 * NaN is not 0
    if (params.out_is_fp32)
        store_fp32(item, out, row, keep);
    else
        store_through_shared(item, out);
}

template <class Traits>
__device__ __forceinline__ void ForwardMath<Traits>::store_fp32(const Item& item, const float (&out)[kOut], int row,
                                                                const float (&keep)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = row + 8 * r;
        if (i >= item.row_end) continue;
        float* to = static_cast<float*>(params.out_rows) + (static_cast<int64_t>(i) * params.num_heads_q + item.head) * Traits::kDim;
#pragma unroll
        for (int j = 0; j < Traits::kDim / 8; ++j) {
            float2* pair = reinterpret_cast<float2*>(to + 8 * j + 2 * (lane % 4));
            float2 value = {out[4 * j + 2 * r], out[4 * j + 2 * r + 1]};
            if (params.accumulate && keep[r] != 0) {
                const float2 held = *pair;
                value.x += keep[r] * held.x;
                value.y += keep[r] * held.y;
            }
            *pair = value;
        }
    }
}

template <class Traits>
__device__ __forceinline__ void ForwardMath<Traits>::store_through_shared(const Item& item, const float (&out)[kOut]) {
    if (is_leader()) ptx::tma_wait_read<0>();  // the store of the tile before has left the buffer
    __syncwarp();
    sync_group();
    const int row = warp * 16 + lane % 16;  // of the warpgroup
#pragma unroll
    for (int j = 0; j < Traits::kDim / 16; ++j) {
        const int half = j / 4, chunk = 2 * (j % 4) + lane / 16;
        const uint32_t to =
            ptx::shared_address(shared.out) + (group * Traits::kHalves + half) * 8192 + row * 128 + ((chunk ^ (row % 8)) * 16);
        ptx::store_matrices(to, ptx::pack<T>(out[8 * j], out[8 * j + 1]), ptx::pack<T>(out[8 * j + 2], out[8 * j + 3]),
                            ptx::pack<T>(out[8 * j + 4], out[8 * j + 5]), ptx::pack<T>(out[8 * j + 6], out[8 * j + 7]));
    }
    ptx::fence_async_shared();
    sync_group();
    const int first = item.row_begin + group * 64;
    if (first + 64 > item.row_end && item.row_end < params.total_q) {
        store_rows(item, first);
    } else if (is_leader()) {
        ptx::tma_store(&params.out, shared.out + group * Traits::kHalves * 4096, 0, first, 0, item.head);
        ptx::tma_commit();
    }
}

// The rows of a tile that ends before the next one begins, as they lie in shared memory; the copy engine would write all 64.
template <class Traits>
__device__ __forceinline__ void ForwardMath<Traits>::store_rows(const Item& item, int first) {
    constexpr int kChunks = Traits::kDim / 8;  // of 16 bytes
    T* to = static_cast<T*>(params.out_rows);
    for (int at = warp * 32 + lane; at < (item.row_end - first) * kChunks; at += 128) {
        const int row = at / kChunks, half = at % kChunks / 8, chunk = at % 8;
        const char* from = reinterpret_cast<const char*>(shared.out) + (group * Traits::kHalves + half) * 8192 + row * 128;
        const int64_t offset = (static_cast<int64_t>(first + row) * params.num_heads_q + item.head) * Traits::kDim;
        *reinterpret_cast<int4*>(to + offset + 64 * half + 8 * chunk) = *reinterpret_cast<const int4*>(from + ((chunk ^ (row % 8)) * 16));
    }
}

// A tile that sees nothing: zeros and -inf (or the sink); when accumulating, what is there stays.
template <class Traits>
__device__ __forceinline__ void ForwardMath<Traits>::finish_empty(const Item& item) {
    if (params.accumulate) return;
    const int first = item.row_begin + group * 64;
    const int num_rows = min(64, item.row_end - first);
    const int element_bytes = params.out_is_fp32 ? 4 : 2;
    const int chunks = Traits::kDim * element_bytes / 16;
    for (int at = warp * 32 + lane; at < num_rows * chunks; at += 128) {
        const int64_t offset = (static_cast<int64_t>(first + at / chunks) * params.num_heads_q + item.head) * Traits::kDim * element_bytes;
        *reinterpret_cast<int4*>(static_cast<char*>(params.out_rows) + offset + (at % chunks) * 16) = int4{0, 0, 0, 0};
    }
    for (int at = warp * 32 + lane; at < num_rows; at += 128) {
        const int64_t i = first + at;
        params.lse[i * params.num_heads_q + item.head] =
            params.sink_lse != nullptr ? params.sink_lse[i * params.sink_token_stride + item.head] : -INFINITY;
    }
}

template <class Traits>
__device__ __forceinline__ void ForwardMath<Traits>::run() {
    // Turns go 0, 1, .. round and round: before the first one everybody has what the groups after it would have passed on.
    for (int earlier = 0; earlier < group; ++earlier) ptx::named_arrive(1 + earlier, 128 * Traits::kGroups);
    for (ptx::Ring<Traits::kTiles> tiles;; tiles.advance()) {
        tile = ptx::uniform(tiles.stage());
        ptx::mbarrier_wait(&shared.q_full[tile], tiles.parity());
        __syncwarp();  // the epilogue before may have left lanes apart, and wgmma wants whole warps
        const Item& told = shared.item[tile];
        const Item item = {ptx::uniform(told.row_begin), ptx::uniform(told.head), ptx::uniform(told.row_end)};
        const bool has_blocks = ptx::uniform_bool(shared.has_blocks[tile] != 0);
        if (item.row_begin < 0) break;
        if (!has_blocks) {
            __syncwarp();
            release(&shared.q_empty[tile]);
            finish_empty(item);
            continue;
        }
        float out[kOut];
        SoftmaxRows rows;
        attend(item, out, rows);
        finish(item, out, rows);
    }
    if (is_leader()) ptx::tma_wait<0>();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) forward_kernel(const __grid_constant__ ForwardParams params) {
    extern __shared__ __align__(1024) char raw[];  // addresses known to the compiler; aligned, for the swizzle
    auto& shared = *reinterpret_cast<ForwardShared<Traits>*>(raw);
    const int group = ptx::uniform(static_cast<int>(threadIdx.x / 128));
    if (threadIdx.x == 0) {
        ptx::prefetch_map(&params.q);
        ptx::prefetch_map(&params.k);
        ptx::prefetch_map(&params.v);
        ptx::prefetch_map(&params.out);
        constexpr int kWarps = 4 * Traits::kGroups;
        shared.queue.init();
        for (int tile = 0; tile < Traits::kTiles; ++tile) {
            ptx::mbarrier_init(&shared.q_full[tile], 1);
            ptx::mbarrier_init(&shared.q_empty[tile], kWarps);
        }
        for (int stage = 0; stage < Traits::kStages; ++stage) {
            ptx::mbarrier_init(&shared.k_full[stage], 1);
            ptx::mbarrier_init(&shared.v_full[stage], 1);
            ptx::mbarrier_init(&shared.k_empty[stage], kWarps);
            ptx::mbarrier_init(&shared.v_empty[stage], kWarps);
        }
        ptx::fence_barrier_init();
    }
    __syncthreads();
    if (group == 0) {
        ptx::lower_registers<Traits::kLoadRegisters>();
        if (threadIdx.x == 0) load_forward<Traits>(params, shared);
        if (threadIdx.x == 32) take_items(params.schedule, params.work, shared.queue);
    } else {
        ptx::raise_registers<Traits::kMathRegisters>();
        ForwardMath<Traits> math{params, shared, group - 1, static_cast<int>(threadIdx.x % 32), static_cast<int>(threadIdx.x % 128 / 32),
                                 {},     0};
        math.run();
    }
}

}  // namespace magi::sm90
