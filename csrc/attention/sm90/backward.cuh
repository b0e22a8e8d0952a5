// Backward attention of one (key tile, kv head) per work item: walks every query block of every query head of the group, keeps dk and dv in
// registers and writes them once; dq leaves block by block through bulk additions into fp32.
// Knows the work list (rows are keys, columns are queries) and tensor maps; nothing of torch, masks as users see them, or steps.
//
// Scores and their gradients are computed transposed (keys as rows), so that P^T and dS^T come out of the accumulators in the layout that
// the products P^T dO and dS^T Q take from registers; only dq needs dS in shared memory. Formulas: Dao et al., arXiv:2205.14135, appendix
// B.2; with s = scale q.k: dv = P^T dO, dS = P * (dO v^T - delta), dq = scale dS k, dk = scale dS^T q.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "attention/launch.h"
#include "attention/sm90/block_mask.cuh"
#include "attention/sm90/schedule.cuh"
#include "attention/sm90/softmax.cuh"
#include "attention/sm90/tiles.h"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace magi::sm90 {

template <class T_, int kDim_, bool kSoftcap_>
struct BackwardTraits {
    using T = T_;
    static constexpr int kDim = kDim_;
    static constexpr bool kSoftcap = kSoftcap_;
    static constexpr int kRows = kBackwardTileRows;                // keys
    static constexpr int kCols = backward_block_cols(kDim);        // queries
    static constexpr int kStatsCols = (kCols + 4 + 31) / 32 * 32;  // copies start at multiples of 4 floats and of 128 bytes
    static constexpr int kGroups = kRows / 64;
    static constexpr int kThreads = 128 * (kGroups + 1);
    static constexpr int kStages = 2;
    static constexpr int kHalves = kDim / 64;
    static constexpr int kColHalves = kCols / 64;
    static constexpr int kLoadRegisters = 24;  // 2 * 240 + 24 = 3 * 168, what the launch has
    static constexpr int kMathRegisters = 240;
    static_assert(kHalves * kColHalves == 2, "each of the two warpgroups makes one 64 x 64 part of dq");
};

template <class Traits>
struct alignas(1024) BackwardShared {
    typename Traits::T k[Traits::kRows * Traits::kDim];
    typename Traits::T v[Traits::kRows * Traits::kDim];
    typename Traits::T q[Traits::kStages][Traits::kCols * Traits::kDim];
    typename Traits::T dout[Traits::kStages][Traits::kCols * Traits::kDim];
    typename Traits::T dscores[2][Traits::kRows * Traits::kCols];      // two rounds: a warpgroup may write the next while the other reads
    float dq[Traits::kGroups][2][64 * 32];                             // per warpgroup, two boxes of 32 columns
    alignas(128) float stats[Traits::kStages][2][Traits::kStatsCols];  // lse in base 2, delta
    Block block[Traits::kStages];
    Item item;                       // tile < 0: no more work; head is the kv head
    int32_t segment_range[2];        // equal: the tile sees nothing
    int32_t piece_begin, piece_end;  // pieces of a tile without interior blocks, which may have rows that nobody sees
    uint64_t kv_full, kv_empty;
    uint64_t q_full[Traits::kStages], q_empty[Traits::kStages];
    uint64_t dout_full[Traits::kStages], dout_empty[Traits::kStages];
};

struct BackwardParams {
    CUtensorMap q, k, v, dout, stats, dq;
    Work work;
    Schedule schedule;
    int32_t total_q, total_k, num_heads_kv, heads_per_group;
    float scale_log2;     // scale * log2(e), or softcap * log2(e)
    float scale_softcap;  // scale / softcap
    float scale;          // of dq and dk
    void* dk;
    void* dv;
    int32_t dkv_is_fp32, accumulate_dkv;
    int32_t wants_dq;
};

// One thread walks work items, heads of the group, segments and blocks, and keeps the rings full. It has 24 registers: what is not needed
// in the inner loop stays in shared memory.
template <class Traits>
__device__ __forceinline__ void load_backward(const BackwardParams& params, BackwardShared<Traits>& shared) {
    constexpr int kTileBytes = Traits::kRows * Traits::kDim * 2;
    constexpr int kBlockBytes = Traits::kCols * Traits::kDim * 2;
    constexpr int kStatsBytes = 2 * Traits::kStatsCols * 4;
    volatile int32_t* segment_range = shared.segment_range;
    uint32_t blocks = 0, items = 0;  // so far; stage and parity follow from them
#pragma unroll 1
    for (int32_t index = blockIdx.x; index < params.schedule.num_items; index = gridDim.x + atomicAdd(params.schedule.counter, 1)) {
        ptx::mbarrier_wait(&shared.kv_empty, ~items++ & 1);
        const Item item = item_at(params.schedule, params.work, index);
        shared.item = item;
        {
            const int32_t begin = __ldg(params.work.segment_offsets + item.tile);
            const int32_t end = __ldg(params.work.segment_offsets + item.tile + 1);
            segment_range[0] = begin;
            segment_range[1] = end;
            if (begin == end) {
                ptx::mbarrier_arrive(&shared.kv_full);
                continue;
            }
            // Edge segments come first and list their pieces one after another; an interior one is seen by every row.
            const WorkSegment* segments = params.work.segments;
            const int2 last = __ldg(reinterpret_cast<const int2*>(segments + end) - 1);
            shared.piece_begin = __ldg(reinterpret_cast<const int2*>(segments + begin) + 1).x;
            shared.piece_end = last.x == last.y ? shared.piece_begin : last.y;
        }
        ptx::mbarrier_arrive_expect(&shared.kv_full, 2 * kTileBytes);
        ptx::tma_load(shared.k, &params.k, &shared.kv_full, 0, item.tile * Traits::kRows, 0, item.head);
        ptx::tma_load(shared.v, &params.v, &shared.kv_full, 0, item.tile * Traits::kRows, 0, item.head);

        const int32_t head_end = (item.head + 1) * params.heads_per_group;
#pragma unroll 1
        for (int32_t head = head_end - params.heads_per_group; head < head_end; ++head) {
#pragma unroll 1
            for (int32_t segment_idx = segment_range[0]; segment_idx < segment_range[1]; ++segment_idx) {
                int4 segment = __ldg(reinterpret_cast<const int4*>(params.work.segments) + segment_idx);
#pragma unroll 1
                for (; segment.x < segment.y; segment.x += Traits::kCols) {
                    int32_t flags = min(segment.y - segment.x, Traits::kCols) | head << 16;
                    if (segment.x + Traits::kCols >= segment.y && segment_idx + 1 == segment_range[1] && head + 1 == head_end)
                        flags |= Block::kLast;
                    const uint32_t stage = blocks % Traits::kStages;
                    ptx::mbarrier_wait(&shared.q_empty[stage], ~(blocks / Traits::kStages) & 1);
                    shared.block[stage] = {segment.x, flags, segment.z, segment.w};
                    ptx::mbarrier_arrive_expect(&shared.q_full[stage], kBlockBytes + kStatsBytes);
                    ptx::tma_load(shared.q[stage], &params.q, &shared.q_full[stage], 0, segment.x, 0, head);
                    ptx::tma_load(shared.stats[stage], &params.stats, &shared.q_full[stage], segment.x & ~3, 0, 0, head);
                    ptx::mbarrier_wait(&shared.dout_empty[stage], ~(blocks / Traits::kStages) & 1);
                    ptx::mbarrier_arrive_expect(&shared.dout_full[stage], kBlockBytes);
                    ptx::tma_load(shared.dout[stage], &params.dout, &shared.dout_full[stage], 0, segment.x, 0, head);
                    ++blocks;
                }
            }
        }
    }
    ptx::mbarrier_wait(&shared.kv_empty, ~items & 1);
    shared.item = {-1, 0};
    ptx::mbarrier_arrive(&shared.kv_full);
}

template <class Traits>
struct BackwardMath {
    using T = typename Traits::T;
    using Scores = float[Traits::kCols / 2];
    using Packed = uint32_t[Traits::kCols / 4];
    using Sums = float[Traits::kDim / 2];
    static constexpr int kTileHalf = Traits::kRows * 128;   // bytes of a 64-element column of k, v
    static constexpr int kBlockHalf = Traits::kCols * 128;  // of q, dout
    static constexpr int kWords = Traits::kCols / 32;

    const BackwardParams& params;
    BackwardShared<Traits>& shared;
    const int group, lane, warp;
    ptx::Ring<Traits::kStages> ring;
    int round = 0;  // which buffer of dscores

    __device__ __forceinline__ void sync_group() { ptx::named_sync(2 + group, 128); }
    __device__ __forceinline__ void sync_all() { ptx::named_sync(1, 128 * Traits::kGroups); }
    __device__ __forceinline__ bool is_leader() const { return warp == 0 && lane == 0; }
    __device__ __forceinline__ void release(uint64_t* barrier) {
        if (lane == 0) ptx::mbarrier_arrive(barrier);
    }

    // acc = rows [64 x dim] of the tile times the transposed block.
    __device__ __forceinline__ void issue_transposed(Scores& acc, const T* tile, const T* block) {
        const uint64_t a = ptx::operand(tile + group * 64 * 64), b = ptx::operand(block);
        ptx::pin(acc);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < Traits::kDim / 16; ++step) {
            const int half = step / 4, within = 32 * (step % 4);
            ptx::Wgmma<T, Traits::kCols, false, false>::ss(acc, ptx::advance(a, half * kTileHalf + within),
                                                           ptx::advance(b, half * kBlockHalf + within), step != 0);
        }
        ptx::wgmma_commit();
    }

    // acc += weights [64 x queries] times the block.
    __device__ __forceinline__ void issue_sums(Sums& acc, Packed& weights, const T* block) {
        const uint64_t b = ptx::operand(block, kBlockHalf);
        ptx::pin(acc);
        ptx::pin(weights);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < Traits::kCols / 16; ++step)
            ptx::Wgmma<T, Traits::kDim, false, true>::rs(acc, weights[4 * step], weights[4 * step + 1], weights[4 * step + 2],
                                                         weights[4 * step + 3], ptx::advance(b, step * 2048), 1);
        ptx::wgmma_commit();
    }

    // This warpgroup's 64 x 64 part of dS k: half of the columns of dim 128, or half of the 128 queries.
    __device__ __forceinline__ void issue_dq(float (&acc)[32], const T* dscores) {
        const uint64_t a = ptx::operand(dscores + (Traits::kColHalves == 2 ? group * Traits::kRows * 64 : 0));
        const uint64_t b = ptx::operand(shared.k + (Traits::kHalves == 2 ? group * Traits::kRows * 64 : 0));
        ptx::pin(acc);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < Traits::kRows / 16; ++step)
            ptx::Wgmma<T, 64, true, true>::ss(acc, ptx::advance(a, step * 2048), ptx::advance(b, step * 2048), step != 0);
        ptx::wgmma_commit();
    }

    // Queries past those that exist: whatever memory holds there must not meet a weight of 0 as NaN.
    __device__ __forceinline__ void clear_missing(T* rows, const Block& block) {
        const int num_cols = block.num_cols();
        if (num_cols == Traits::kCols || block.col_begin + num_cols >= params.total_q) return;
        const uint32_t base = ptx::shared_address(rows);
        const int chunks = (Traits::kCols - num_cols) * 8;
        for (int half = 0; half < Traits::kHalves; ++half)
            for (int chunk = 32 * warp + lane; chunk < chunks; chunk += 128)
                ptx::store_zeros(base + half * kBlockHalf + num_cols * 128 + chunk * 16);
        ptx::fence_async_shared();
        sync_group();
    }

    // The same for keys of the tile that no query sees: 0 * NaN would reach dq. Ordered by the barrier before the first dq product.
    __device__ __forceinline__ void clear_unseen_keys(int tile) {
        const int begin = shared.piece_begin, end = shared.piece_end;
        const int row = 32 * warp + lane;
        if (begin == end || row >= 64) return;
        const int key = tile * Traits::kRows + group * 64 + row;
        bool is_seen = key >= params.total_k;  // zeros already
        for (int idx = begin; idx < end && !is_seen; ++idx) {
            const int2 rows = __ldg(reinterpret_cast<const int2*>(params.work.pieces + idx));
            is_seen = key >= rows.x && key < rows.y;
        }
        if (!is_seen) {
            const uint32_t base = ptx::shared_address(shared.k) + (group * 64 + row) * 128;
            for (int half = 0; half < Traits::kHalves; ++half)
                for (int chunk = 0; chunk < 8; ++chunk) ptx::store_zeros(base + half * kTileHalf + chunk * 16);
        }
        ptx::fence_async_shared();
        __syncwarp();  // wgmma follows, which wants whole warps
    }

    __device__ __forceinline__ void pack_all(Packed& packed, const Scores& values) {
#pragma unroll
        for (int i = 0; i < Traits::kCols / 4; ++i) packed[i] = ptx::pack<T>(values[2 * i], values[2 * i + 1]);
    }

    __device__ __forceinline__ void store_dscores(T* to, const Packed& packed) {
        const int row = group * 64 + warp * 16 + lane % 16;
#pragma unroll
        for (int j = 0; j < Traits::kCols / 16; ++j) {
            const int half = j / 4, chunk = 2 * (j % 4) + lane / 16;
            ptx::store_matrices(ptx::shared_address(to) + half * kTileHalf + row * 128 + ((chunk ^ (row % 8)) * 16), packed[4 * j],
                                packed[4 * j + 1], packed[4 * j + 2], packed[4 * j + 3]);
        }
        ptx::fence_async_shared();
    }

    __device__ __forceinline__ void add_dq(const float (&acc)[32], const Block& block) {
        const uint32_t base = ptx::shared_address(shared.dq[group]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = warp * 16 + lane / 4 + 8 * r;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int box = j / 4, chunk = 2 * (j % 4) + (lane % 4) / 2;
                const uint32_t to = base + box * 8192 + row * 128 + ((chunk ^ (row % 8)) * 16) + (lane % 2) * 8;
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(acc[4 * j + 2 * r] * params.scale),
                             "f"(acc[4 * j + 2 * r + 1] * params.scale)
                             : "memory");
            }
        }
        ptx::fence_async_shared();
        sync_group();
        if (is_leader()) {
            const int column = Traits::kHalves == 2 ? 2 * group : 0, token = block.col_begin + (Traits::kColHalves == 2 ? 64 * group : 0);
            ptx::tma_reduce_add(&params.dq, shared.dq[group], 0, token, column, block.head());
            ptx::tma_commit();
        }
    }

    __device__ __forceinline__ void run();
    __device__ __forceinline__ bool step(int tile, Sums& dk, Sums& dv);
    __device__ __forceinline__ ColumnBits<2, kWords> visible(const Block& block, int tile);
    __device__ __forceinline__ float weight(float score, float lse) { return ptx::exp2_fast(fmaf(score, params.scale_log2, -lse)); }
    __device__ __forceinline__ void weigh(Scores& scores, Packed& weights, int first, bool hides, const ColumnBits<2, kWords>& bits);
    __device__ __forceinline__ void differentiate(Scores& scores, Scores& dscores, Packed& weights, int first, bool hides,
                                                  const ColumnBits<2, kWords>& bits);
    __device__ __forceinline__ void store(void* to, const Item& item, const Sums& values, float scale);
    __device__ __forceinline__ void store_zeros(const Item& item);
};

// What the rows of this thread see of the block.
template <class Traits>
__device__ __forceinline__ ColumnBits<2, BackwardMath<Traits>::kWords> BackwardMath<Traits>::visible(const Block& block, int tile) {
    const int warp_row = tile * Traits::kRows + group * 64 + warp * 16;
    if (block.is_edge()) return visible_columns<kWords>(params.work.pieces, block, warp_row, lane);
    ColumnBits<2, kWords> bits;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int w = 0; w < kWords; ++w) bits.word[r][w] = warp_row + lane / 4 + 8 * r < params.total_k ? ~0u : 0u;
    return bits;
}

// `first` is where the statistics of this thread's first column are.
// scores -> softmax weights, in fp32; with a softcap scores -> tanh, the weights are packed only and computed again later.
template <class Traits>
__device__ __forceinline__ void BackwardMath<Traits>::weigh(Scores& scores, Packed& weights, int first, bool hides,
                                                            const ColumnBits<2, kWords>& bits) {
    const float* lse = shared.stats[ring.stage][0] + first;
#pragma unroll
    for (int j = 0; j < Traits::kCols / 8; ++j) {
        const float2 shift = {lse[8 * j], lse[8 * j + 1]};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float &left = scores[4 * j + 2 * r], &right = scores[4 * j + 2 * r + 1];
            if constexpr (Traits::kSoftcap) {
                left = tanh_exact(left * params.scale_softcap);
                right = tanh_exact(right * params.scale_softcap);
                float2 pair = {weight(left, shift.x), weight(right, shift.y)};
                if (hides) pair = {sees(bits, j, r, 0, lane) ? pair.x : 0.0f, sees(bits, j, r, 1, lane) ? pair.y : 0.0f};
                weights[2 * j + r] = ptx::pack<T>(pair.x, pair.y);
            } else {
                left = weight(left, shift.x);
                right = weight(right, shift.y);
            }
        }
    }
    if constexpr (!Traits::kSoftcap)
        if (hides) hide_columns<kWords>(scores, bits, lane, 0.0f);
}

// dscores = weights * (dscores - delta), times the slope of the softcap; packs the weights.
template <class Traits>
__device__ __forceinline__ void BackwardMath<Traits>::differentiate(Scores& scores, Scores& dscores, Packed& weights, int first, bool hides,
                                                                    const ColumnBits<2, kWords>& bits) {
    const float* lse = shared.stats[ring.stage][0] + first;
    const float* delta = shared.stats[ring.stage][1] + first;
#pragma unroll
    for (int j = 0; j < Traits::kCols / 8; ++j) {
        const float2 shift = {delta[8 * j], delta[8 * j + 1]};
        float2 again{};
        if constexpr (Traits::kSoftcap) again = {lse[8 * j], lse[8 * j + 1]};
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; ++i) {
            const float gradient = dscores[i] - (i % 2 ? shift.y : shift.x);
            if constexpr (Traits::kSoftcap)
                dscores[i] = weight(scores[i], i % 2 ? again.y : again.x) * gradient * (1.0f - scores[i] * scores[i]);
            else
                dscores[i] = scores[i] * gradient;
        }
    }
    if (hides) hide_columns<kWords>(dscores, bits, lane, 0.0f);  // again: 0 * NaN of an unseen v or dout is not 0
    if constexpr (!Traits::kSoftcap) pack_all(weights, scores);
}

// One block of queries; true after the last one of the item.
template <class Traits>
__device__ __forceinline__ bool BackwardMath<Traits>::step(int tile, Sums& dk, Sums& dv) {
    Scores scores, dscores;
    Packed weights, dweights;
    const int stage = ring.stage;
    ptx::mbarrier_wait(&shared.q_full[stage], ring.parity);
    const Block block = shared.block[stage];
    clear_missing(shared.q[stage], block);
    issue_transposed(scores, shared.k, shared.q[stage]);
    ptx::mbarrier_wait(&shared.dout_full[stage], ring.parity);
    clear_missing(shared.dout[stage], block);
    // A softcap needs so many registers that the second product has to wait for the weights.
    if constexpr (!Traits::kSoftcap) issue_transposed(dscores, shared.v, shared.dout[stage]);
    // A short tile's missing rows are not in the list; their weight would be exp(-lse), which can be infinite.
    const bool hides = block.is_edge() || (tile + 1) * Traits::kRows > params.total_k;
    ColumnBits<2, kWords> bits;
    if (hides) bits = visible(block, tile);
    const int first = block.col_begin % 4 + 2 * (lane % 4);  // statistics of this thread's first column
    ptx::wgmma_wait<Traits::kSoftcap ? 0 : 1>();
    ptx::pin(scores);
    weigh(scores, weights, first, hides, bits);
    if constexpr (Traits::kSoftcap) issue_transposed(dscores, shared.v, shared.dout[stage]);
    ptx::wgmma_wait<0>();
    ptx::pin(dscores);
    differentiate(scores, dscores, weights, first, hides, bits);
    pack_all(dweights, dscores);

    T* exchange = shared.dscores[round];
    round ^= 1;
    issue_sums(dv, weights, shared.dout[stage]);
    store_dscores(exchange, dweights);
    if (is_leader()) ptx::tma_wait_read<0>();  // the additions of the block before have left the buffer; told by the barrier
    sync_all();
    float dq[32];
    issue_dq(dq, exchange);
    issue_sums(dk, dweights, shared.q[stage]);
    ptx::wgmma_wait<2>();
    ptx::pin(dv);
    release(&shared.dout_empty[stage]);
    ptx::wgmma_wait<1>();
    ptx::pin(dq);
    if (block.is_last()) release(&shared.kv_empty);
    add_dq(dq, block);
    ptx::wgmma_wait<0>();
    ptx::pin(dk);
    release(&shared.q_empty[stage]);
    ring.advance();
    return block.is_last();
}

template <class Traits>
__device__ __forceinline__ void BackwardMath<Traits>::store(void* to, const Item& item, const Sums& values, float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = item.tile * Traits::kRows + group * 64 + warp * 16 + lane / 4 + 8 * r;
        if (row >= params.total_k) continue;
        const int64_t offset = (static_cast<int64_t>(row) * params.num_heads_kv + item.head) * Traits::kDim;
#pragma unroll
        for (int j = 0; j < Traits::kDim / 8; ++j) {
            const int64_t at = offset + 8 * j + 2 * (lane % 4);
            float2 value = {values[4 * j + 2 * r] * scale, values[4 * j + 2 * r + 1] * scale};
            if (!params.dkv_is_fp32) {
                *reinterpret_cast<uint32_t*>(static_cast<T*>(to) + at) = ptx::pack<T>(value.x, value.y);
                continue;
            }
            float2* pair = reinterpret_cast<float2*>(static_cast<float*>(to) + at);
            if (params.accumulate_dkv) {
                const float2 held = *pair;
                value.x += held.x;
                value.y += held.y;
            }
            *pair = value;
        }
    }
}

template <class Traits>
__device__ __forceinline__ void BackwardMath<Traits>::run() {
    for (uint32_t kv_parity = 0;; kv_parity ^= 1) {
        ptx::mbarrier_wait(&shared.kv_full, kv_parity);
        __syncwarp();
        const Item item = shared.item;
        const bool has_blocks = shared.segment_range[0] != shared.segment_range[1];
        if (item.tile < 0) break;
        Sums dk, dv;
#pragma unroll
        for (int i = 0; i < Traits::kDim / 2; ++i) dk[i] = dv[i] = 0;
        if (has_blocks) {
            clear_unseen_keys(item.tile);
            while (!step(item.tile, dk, dv)) {
            }
        } else {
            __syncwarp();
            release(&shared.kv_empty);
            if (params.accumulate_dkv) continue;
        }
        store(params.dk, item, dk, params.scale);
        store(params.dv, item, dv, 1.0f);
    }
    if (is_leader()) ptx::tma_wait<0>();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) backward_kernel(const __grid_constant__ BackwardParams params) {
    extern __shared__ __align__(1024) char raw[];  // addresses known to the compiler; aligned, for the swizzle
    auto& shared = *reinterpret_cast<BackwardShared<Traits>*>(raw);
    const int group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        constexpr int kWarps = 4 * Traits::kGroups;
        ptx::mbarrier_init(&shared.kv_full, 1);
        ptx::mbarrier_init(&shared.kv_empty, kWarps);
        for (int stage = 0; stage < Traits::kStages; ++stage) {
            ptx::mbarrier_init(&shared.q_full[stage], 1);
            ptx::mbarrier_init(&shared.dout_full[stage], 1);
            ptx::mbarrier_init(&shared.q_empty[stage], kWarps);
            ptx::mbarrier_init(&shared.dout_empty[stage], kWarps);
        }
        ptx::fence_barrier_init();
    }
    __syncthreads();
    if (group == 0) {
        ptx::lower_registers<Traits::kLoadRegisters>();
        if (threadIdx.x == 0) load_backward<Traits>(params, shared);
    } else {
        ptx::raise_registers<Traits::kMathRegisters>();
        BackwardMath<Traits> math{params, shared, group - 1, static_cast<int>(threadIdx.x % 32), static_cast<int>(threadIdx.x % 128 / 32),
                                  {}};
        math.run();
    }
}

}  // namespace magi::sm90
