// Backward attention of one (key tile, kv head) per work item: walks every query block of every query head of the group, keeps dk and dv in
// registers and writes them once; dq leaves block by block through bulk additions into fp32.
// Knows the work list (rows are keys, columns are queries) and tensor maps; nothing of torch, masks as users see them, or steps.
//
// Scores and their gradients are computed transposed (keys as rows), so that P^T and dS^T come out of the accumulators in the layout that
// the products P^T dO and dS^T Q take from registers; only dq needs dS in shared memory. Formulas: Dao et al., arXiv:2205.14135, appendix
// B.2; with s = scale q.k: dv = P^T dO, dS = P * (dO v^T - delta), dq = scale dS k, dk = scale dS^T q.
#pragma once

#include <cstdint>

#include "attention/sm90/backward_load.cuh"
#include "attention/sm90/products.cuh"
#include "attention/sm90/softmax.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace magi::sm90 {

template <class Traits>
struct BackwardMath {
    using T = typename Traits::T;
    using Scores = float[Traits::kCols / 2];
    using Packed = uint32_t[Traits::kCols / 4];
    using Sums = float[Traits::kDim / 2];
    using DqSums = float[Traits::kDqCols / 2];
    using Shifts = float[Traits::kCols / 4];
    static constexpr int kTileHalf = Traits::kRows * 128;   // bytes of a 64-element column of k, v
    static constexpr int kBlockHalf = Traits::kCols * 128;  // of q, dout
    static constexpr int kWords = Traits::kCols / 32;

    const BackwardParams& params;
    BackwardShared<Traits>& shared;
    const int group, lane, warp;
    ptx::Ring<Traits::kStages> ring;
    int flags;  // of the block that the ring has come to; between items the parity of the next one

    __device__ __forceinline__ void sync_group() { ptx::named_sync(2 + group, 128); }
    __device__ __forceinline__ void sync_all() { ptx::named_sync(1, 256); }
    // The same number, of which the compiler knows nothing: an address made from it is made anew each time, instead of kept in a register
    // that the loop over blocks does not have.
    static __device__ __forceinline__ int opaque(int value) {
        asm volatile("" : "+r"(value));
        return value;
    }
    __device__ __forceinline__ bool is_leader() const { return warp == 0 && lane == 0; }
    __device__ __forceinline__ void release(uint64_t* barrier) {
        __syncwarp();  // the other lanes have read what may be overwritten now
        if (lane == 0) ptx::mbarrier_arrive(barrier);
    }

    // acc (+)= rows [64 x dim] of the tile times the transposed block. The caller pins and fences.
    __device__ __forceinline__ void issue_transposed(Scores& acc, const T* tile, const T* block, bool accumulate) {
        issue_rows_by_rows<T, Traits::kDim, Traits::kCols>(acc, tile + group * 64 * 64, kTileHalf, block, kBlockHalf, accumulate);
    }

    // acc += weights [64 x queries] times the block.
    __device__ __forceinline__ void issue_sums(Sums& acc, Packed& weights, const T* block) {
        issue_weights_by_block<T, Traits::kDim>(acc, weights, block, kBlockHalf, true);
    }

    // This warpgroup's columns of dS k.
    __device__ __forceinline__ void issue_dq(DqSums& acc, const T* dscores) {
        constexpr int kStart = Traits::kDim == 128 ? Traits::kRows * 64 : 32;  // elements from one warpgroup's columns to the other's
        const uint64_t a = ptx::operand(dscores), b = ptx::operand(shared.k + group * kStart);
        ptx::pin(acc);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < Traits::kRows / 16; ++step)
            ptx::Wgmma<T, Traits::kDqCols, true, true>::ss(acc, ptx::advance(a, step * 2048), ptx::advance(b, step * 2048), step != 0);
        ptx::wgmma_commit();
    }

    // The block that the ring has come to; waits until it is there.
    __device__ __forceinline__ void look_at_block() {
        ptx::mbarrier_wait(&shared.q_full[ring.stage()], ring.parity());
        flags = ptx::uniform(shared.block[ring.stage()].block.flags);
    }

    // Queries past those that exist: whatever memory holds there must not meet a weight of 0 as NaN.
    __device__ __forceinline__ void clear_missing(int stage) {
        const Block block = shared.block[stage].block;
        const int num_cols = block.num_cols();
        if (block.col_begin + num_cols >= params.total_q) return;
        ptx::mbarrier_wait(&shared.dout_full[stage], ring.parity());
        clear_rows_from<Traits::kDim, Traits::kCols>(shared.q[stage], num_cols, 32 * warp + lane);
        clear_rows_from<Traits::kDim, Traits::kCols>(shared.dout[stage], num_cols, 32 * warp + lane);
        sync_group();
    }

    // The same for keys of the tile that no query sees: 0 * NaN would reach dq. Ordered by the barrier before the first dq product.
    __device__ __forceinline__ void clear_unseen_keys() {
        const int begin = shared.piece_begin, end = shared.piece_end;
        const int row = 32 * warp + opaque(lane);
        const int key = shared.item.row_begin + group * 64 + row;
        const bool is_whole = shared.item.row_end - shared.item.row_begin == Traits::kRows;
        if ((begin == end && is_whole) || row >= 64) return;  // whole warps
        bool is_seen = begin == end && key < shared.item.row_end;
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

    // Chunks of 16 bytes are swizzled by the row, so those of a row differ from its first address by exclusive or.
    __device__ __forceinline__ void store_dscores(T* to, const Packed& packed) {
        const int own = opaque(lane);
        const int row = group * 64 + warp * 16 + own % 16;
        const uint32_t first = ptx::shared_address(to) + row * 128 + ((own / 16) ^ (row % 8)) * 16;
#pragma unroll
        for (int j = 0; j < Traits::kCols / 16; ++j)
            ptx::store_matrices(first ^ (32 * j), packed[4 * j], packed[4 * j + 1], packed[4 * j + 2], packed[4 * j + 3]);
        ptx::fence_async_shared();
        __syncwarp();
    }

    // Rows that differ by one share their banks pairwise in this swizzle, so odd rows store their pairs in another order.
    __device__ __forceinline__ void add_dq(const DqSums& acc) {
        ptx::mbarrier_wait(&shared.dq_empty[group], ring.stage() ^ 1);
        const int own = opaque(lane);
        const bool is_odd = (own / 4) % 2 != 0;
        const int row = warp * 16 + own / 4;
        const uint32_t first =
            ptx::shared_address(shared.dq[group]) + row * 128 + (((own % 4) / 2) ^ (row % 8) ^ (is_odd ? 4 : 0)) * 16 + (own % 2) * 8;
#pragma unroll
        for (int j = 0; j < Traits::kDqCols / 8; ++j) {
            const int other = j ^ 2;
            const uint32_t to = first ^ (32 * (j % 4));
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float x = is_odd ? acc[4 * other + 2 * r] : acc[4 * j + 2 * r];
                const float y = is_odd ? acc[4 * other + 2 * r + 1] : acc[4 * j + 2 * r + 1];
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + j / 4 * 8192 + r * 1024), "f"(x * params.scale),
                             "f"(y * params.scale)
                             : "memory");
            }
        }
        if (is_leader()) shared.dq_at[group] = {shared.block[ring.stage()].block.col_begin, shared.block[ring.stage()].block.head()};
        ptx::fence_async_shared();
        release(&shared.dq_full[group]);
    }

    __device__ __forceinline__ void run();
    __device__ __forceinline__ bool step(Sums& dk, Sums& dv);
    __device__ __forceinline__ ColumnBits<2, kWords> visible(const BlockSlot& slot);
    // A pair for each eight columns. Blocks begin at any query, so that pairs may lie across.
    __device__ __forceinline__ void read_stats(Shifts& to, const float* from) {
        const uint32_t at = ptx::shared_address(from) + 4 * (flags >> Block::kStartBits & 3) + 8 * (opaque(lane) % 4);
        if (flags & Block::kOddStart) {
#pragma unroll
            for (int j = 0; j < Traits::kCols / 4; ++j)
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(to[j]) : "r"(at + 32 * (j / 2) + 4 * (j % 2)));
        } else {
#pragma unroll
            for (int j = 0; j < Traits::kCols / 8; ++j)
                asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to[2 * j]), "=f"(to[2 * j + 1]) : "r"(at + 32 * j));
        }
    }
    // The products begin at -lse / scale and at -delta, so that nobody waits for either between them: reads of shared memory queue behind
    // those of the products. With a softcap lse comes after the cap.
    __device__ __forceinline__ void begin_products(Scores& scores, Scores& dscores) {
        Shifts lse, delta;
        if constexpr (!Traits::kSoftcap) read_stats(lse, shared.stats[ring.stage()][0]);
        read_stats(delta, shared.stats[ring.stage()][1]);
#pragma unroll
        for (int i = 0; i < Traits::kCols / 2; ++i) {
            if constexpr (!Traits::kSoftcap) scores[i] = lse[i / 4 * 2 + i % 2];
            dscores[i] = delta[i / 4 * 2 + i % 2];
        }
    }
    __device__ __forceinline__ void weigh(Scores& scores, bool hides, const ColumnBits<2, kWords>& bits);
    __device__ __forceinline__ void differentiate(Scores& scores, Scores& dscores, Packed& weights, bool hides,
                                                  const ColumnBits<2, kWords>& bits);
    __device__ __forceinline__ void store(void* to, const Item& item, const Sums& values, float scale);
};

// What the rows of this thread see of the block.
template <class Traits>
__device__ __forceinline__ ColumnBits<2, BackwardMath<Traits>::kWords> BackwardMath<Traits>::visible(const BlockSlot& slot) {
    const int warp_row = shared.item.row_begin + group * 64 + warp * 16;
    if (flags & Block::kEdge) return visible_columns<kWords>(params.work.pieces, slot, slot.block, warp_row, lane);
    ColumnBits<2, kWords> bits;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int w = 0; w < kWords; ++w) bits.word[r][w] = warp_row + lane / 4 + 8 * r < shared.item.row_end ? ~0u : 0u;
    return bits;
}

// scores -> softmax weights; with a softcap only -> tanh, the slope of the cap needs it.
template <class Traits>
__device__ __forceinline__ void BackwardMath<Traits>::weigh(Scores& scores, bool hides, const ColumnBits<2, kWords>& bits) {
    if constexpr (Traits::kSoftcap) {
#pragma unroll
        for (int i = 0; i < Traits::kCols / 2; ++i) scores[i] = tanh_exact(scores[i] * params.scale_softcap);
    } else {
#pragma unroll
        for (int i = 0; i < Traits::kCols / 2; ++i) scores[i] = ptx::exp2_fast(scores[i] * params.scale_log2);
        if (hides) hide_columns<kWords>(scores, bits, lane, 0.0f);
    }
}

// dscores (of which delta is taken) *= weights, times the slope of the softcap; packs the weights.
template <class Traits>
__device__ __forceinline__ void BackwardMath<Traits>::differentiate(Scores& scores, Scores& dscores, Packed& weights, bool hides,
                                                                    const ColumnBits<2, kWords>& bits) {
    const float* shifts = shared.stats[ring.stage()][0] + (flags >> Block::kStartBits & 3) + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < Traits::kCols / 8; ++j) {
        if constexpr (Traits::kSoftcap) {
            const float2 shift = {shifts[8 * j], shifts[8 * j + 1]};
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = 4 * j + 2 * r;
                float2 pair = {ptx::exp2_fast(fmaf(scores[i], params.scale_log2, shift.x)),
                               ptx::exp2_fast(fmaf(scores[i + 1], params.scale_log2, shift.y))};
                if (hides) pair = {sees(bits, j, r, 0, lane) ? pair.x : 0.0f, sees(bits, j, r, 1, lane) ? pair.y : 0.0f};
                weights[2 * j + r] = ptx::pack<T>(pair.x, pair.y);
                dscores[i] *= pair.x * (1.0f - scores[i] * scores[i]);
                dscores[i + 1] *= pair.y * (1.0f - scores[i + 1] * scores[i + 1]);
            }
        } else {
#pragma unroll
            for (int i = 4 * j; i < 4 * j + 4; ++i) dscores[i] *= scores[i];
        }
    }
    if (hides) hide_columns<kWords>(dscores, bits, lane, 0.0f);  // again: 0 * NaN of an unseen v or dout is not 0
    if constexpr (!Traits::kSoftcap) pack_all(weights, scores);
}

// One block of queries; true after the last one of the item.
template <class Traits>
__device__ __forceinline__ bool BackwardMath<Traits>::step(Sums& dk, Sums& dv) {
    Scores scores, dscores;
    Packed weights, dweights;
    begin_products(scores, dscores);
    const int stage = ring.stage();
    if ((flags & 0xFF) != Traits::kCols) clear_missing(stage);
    ptx::pin(scores);
    ptx::pin(dscores);
    ptx::wgmma_fence();
    issue_transposed(scores, shared.k, shared.q[stage], !Traits::kSoftcap);
    ptx::mbarrier_wait(&shared.dout_full[stage], ring.parity());
    ptx::wgmma_fence();
    issue_transposed(dscores, shared.v, shared.dout[stage], true);
    // A short tile's missing rows are not in the list; their weight would be exp(-lse), which can be infinite.
    const bool hides = (flags & (Block::kEdge | Block::kShort)) != 0;
    ColumnBits<2, kWords> bits;
    if (hides) bits = visible(shared.block[stage]);
    ptx::wgmma_wait<1>();
    ptx::pin(scores);
    weigh(scores, hides, bits);
    ptx::wgmma_wait<0>();
    ptx::pin(dscores);
    differentiate(scores, dscores, weights, hides, bits);
    pack_all(dweights, dscores);

    issue_sums(dv, weights, shared.dout[stage]);
    DqSums dq;
    if constexpr (Traits::kWantsDq) {
        store_dscores(shared.dscores[stage], dweights);
        sync_all();
        issue_dq(dq, shared.dscores[stage]);
    }
    issue_sums(dk, dweights, shared.q[stage]);
    ptx::wgmma_wait<1>();
    ptx::pin(dv);
    release(&shared.dout_empty[stage]);
    if constexpr (Traits::kWantsDq) {
        ptx::pin(dq);
        add_dq(dq);
    }
    const bool is_last = (flags & Block::kLast) != 0;
    ring.advance();
    if (!is_last) look_at_block();
    ptx::wgmma_wait<0>();
    ptx::pin(dk);
    release(&shared.q_empty[stage]);
    return is_last;
}

template <class Traits>
__device__ __forceinline__ void BackwardMath<Traits>::store(void* to, const Item& item, const Sums& values, float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = item.row_begin + group * 64 + warp * 16 + lane / 4 + 8 * r;
        if (row >= item.row_end) continue;
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
            if (params.head_splits > 1) {
                ptx::add_pair(pair, value);
                continue;
            }
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
    while (true) {
        ptx::mbarrier_wait(&shared.kv_full, static_cast<uint32_t>(flags));
        __syncwarp();
        if (shared.item.row_begin < 0) break;
        const bool has_blocks = ptx::uniform_bool(shared.has_blocks != 0);
        Sums dk, dv;
#pragma unroll
        for (int i = 0; i < Traits::kDim / 2; ++i) dk[i] = dv[i] = 0;
        if (has_blocks) {
            clear_unseen_keys();
            look_at_block();
            while (!step(dk, dv)) {
            }
        }
        const Item item = shared.item;
        flags = shared.next_parity;
        release(&shared.kv_empty);
        if (!has_blocks && params.accumulate_dkv) continue;
        store(params.dk, item, dk, params.scale);
        store(params.dv, item, dv, 1.0f);
    }
    if constexpr (Traits::kWantsDq) {
        ptx::mbarrier_wait(&shared.dq_empty[group], ring.stage() ^ 1);
        if (is_leader()) shared.dq_at[group] = {0, -1};
        release(&shared.dq_full[group]);
    }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) backward_kernel(const __grid_constant__ BackwardParams params) {
    extern __shared__ __align__(1024) char raw[];  // addresses known to the compiler; aligned, for the swizzle
    auto& shared = *reinterpret_cast<BackwardShared<Traits>*>(raw);
    const int group = ptx::uniform(static_cast<int>(threadIdx.x / 128));
    if (threadIdx.x == 0) {
        constexpr int kWarps = 4 * Traits::kGroups;
        shared.queue.init();
        ptx::mbarrier_init(&shared.kv_full, 1);
        ptx::mbarrier_init(&shared.kv_empty, kWarps);
        for (int stage = 0; stage < Traits::kStages; ++stage) {
            ptx::mbarrier_init(&shared.q_full[stage], 1);
            ptx::mbarrier_init(&shared.dout_full[stage], 1);
            ptx::mbarrier_init(&shared.q_empty[stage], kWarps);
            ptx::mbarrier_init(&shared.dout_empty[stage], kWarps);
        }
        for (int to = 0; to < Traits::kGroups; ++to) {
            ptx::mbarrier_init(&shared.dq_full[to], 4);
            ptx::mbarrier_init(&shared.dq_empty[to], 1);
        }
        ptx::fence_barrier_init();
    }
    __syncthreads();
    if (group == 0) {
        ptx::lower_registers<Traits::kLoadRegisters>();
        if (threadIdx.x == 0) load_backward<Traits>(params, shared);
        if (threadIdx.x == 32) take_items(params.schedule, params.work, shared.queue);
        if (Traits::kWantsDq && threadIdx.x % 32 == 0 && threadIdx.x >= 64) add_dq_blocks(params, shared, threadIdx.x / 32 - 2);
    } else {
        ptx::raise_registers<Traits::kMathRegisters>();
        BackwardMath<Traits> math{params, shared, group - 1, static_cast<int>(threadIdx.x % 32), static_cast<int>(threadIdx.x % 128 / 32),
                                  {},     0};
        math.run();
    }
}

}  // namespace magi::sm90
