// What the kernels' multiplying sides share: the two shapes of matrix product, and rows cleared before one. Knows nothing of masks, rings
// or items.
//
// A tile or block of vectors lies in shared memory column by column: 64 elements (128 bytes, swizzled) of every row, then the next 64.
#pragma once

#include <cstdint>

#include "ptx/barrier.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace magi::sm90 {

// acc (+)= 64 rows of a tile times all N rows of a block, summed over kDim. *_column: bytes from one column to the next. The caller fences.
template <class T, int kDim, int N>
__device__ __forceinline__ void issue_rows_by_rows(float (&acc)[N / 2], const T* rows, int rows_column, const T* block, int block_column,
                                                   bool accumulate = false) {
    const uint64_t a = ptx::operand(rows), b = ptx::operand(block);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
        const int column = step / 4, within = 32 * (step % 4);
        ptx::Wgmma<T, N, false, false>::ss(acc, ptx::advance(a, column * rows_column + within),
                                           ptx::advance(b, column * block_column + within), accumulate || step != 0);
    }
    ptx::wgmma_commit();
}

// sums (+)= weights [64 x rows of the block] times the block [rows x kDim].
template <class T, int kDim, int kPacked>
__device__ __forceinline__ void issue_weights_by_block(float (&sums)[kDim / 2], uint32_t (&weights)[kPacked], const T* block,
                                                       int block_column, bool accumulate) {
    const uint64_t b = ptx::operand(block, block_column);
    ptx::pin(sums);
    ptx::pin(weights);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kPacked / 4; ++step)
        ptx::Wgmma<T, kDim, false, true>::rs(sums, weights[4 * step], weights[4 * step + 1], weights[4 * step + 2], weights[4 * step + 3],
                                             ptx::advance(b, step * 2048), accumulate || step != 0);
    ptx::wgmma_commit();
}

// Rows from `first` on become zeros: what memory holds there must not meet a weight of 0 as NaN. Thread `thread` of 128; a barrier of the
// warpgroup must follow. The other warpgroup may write the same zeros.
template <int kDim, int kRows>
__device__ __forceinline__ void clear_rows_from(void* block, int first, int thread) {
    const uint32_t base = ptx::shared_address(block);
    const int chunks = (kRows - first) * 8;
    for (int column = 0; column < kDim / 64; ++column)
        for (int chunk = thread; chunk < chunks; chunk += 128) ptx::store_zeros(base + column * kRows * 128 + first * 128 + chunk * 16);
    ptx::fence_async_shared();
}

}  // namespace magi::sm90
