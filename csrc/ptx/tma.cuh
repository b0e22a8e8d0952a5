// Bulk tensor copies (TMA) between global and shared memory, four dimensions: (element, token, column, head), where a column is a
// group of elements of one vector that fills the width of a swizzle, so that one instruction moves a whole tile column by column. Knows
// nothing of attention.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/barrier.cuh"

namespace magi::ptx {

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// Box at (element, token, column, head) to `to`; completes on `barrier`. Tokens outside the tensor arrive as zeros.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int element, int token, int column,
                                         int head) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
            shared_address(to)),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(shared_address(barrier)), "r"(element), "r"(token), "r"(column), "r"(head)
        : "memory");
}

// Tokens outside the tensor are not written.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int element, int token, int column, int head) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(reinterpret_cast<uint64_t>(map)),
        "r"(shared_address(from)), "r"(element), "r"(token), "r"(column), "r"(head)
        : "memory");
}

// Adds instead of storing; the additions of one element happen in the memory system, in any order.
__device__ __forceinline__ void tma_reduce_add(const CUtensorMap* map, const void* from, int element, int token, int column, int head) {
    asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
                     reinterpret_cast<uint64_t>(map)),
                 "r"(shared_address(from)), "r"(element), "r"(token), "r"(column), "r"(head)
                 : "memory");
}

__device__ __forceinline__ void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most kPending of this thread's groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void tma_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

template <int kPending>
__device__ __forceinline__ void tma_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace magi::ptx
