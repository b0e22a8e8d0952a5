// mbarrier and named barrier instructions, and the fences between the generic and the async proxy. Knows nothing of attention.
#pragma once

#include <cstdint>

namespace magi::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine; a __syncthreads() must follow.
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// One arrival that also announces `bytes` of copies to come.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Returns once the phase with this parity is complete.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra ready;\n"
        "bra again;\n"
        "ready:\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// Waits until `threads` threads have come to barrier `id`, through sync or arrive.
__device__ __forceinline__ void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Ordinary stores to shared memory before it become visible to wgmma and the copy engine after it (each writing thread, then a barrier).
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A ring of buffers, known by how often it moved: one register.
template <int kStages>
struct Ring {
    uint32_t moved = 0;

    __device__ __forceinline__ int stage() const { return static_cast<int>(moved % kStages); }
    // Parity its barrier shows once this round of the stage is filled; a free stage shows the other one.
    __device__ __forceinline__ uint32_t parity() const { return moved / kStages & 1; }
    __device__ __forceinline__ uint32_t free_parity() const { return ~(moved / kStages) & 1; }
    __device__ __forceinline__ void advance() { ++moved; }
    __device__ __forceinline__ Ring previous() const { return {moved - 1}; }
    __device__ __forceinline__ Ring next() const { return {moved + 1}; }
};

}  // namespace magi::ptx
