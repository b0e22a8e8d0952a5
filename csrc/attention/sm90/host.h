// What the launchers share on the host: errors of this thread, tensor maps, schedules. CUDA runtime only; the driver's encoder is found at
// run time.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

#include "attention/launch.h"
#include "attention/sm90/schedule.cuh"

namespace magi {

// Remembers why a call of this thread failed; returns 1.
int fail(const std::string& reason);
int fail(const char* what, cudaError_t status);

// Map of [tokens, heads, head_dim] for 4D boxes (128 bytes of a vector, tokens, number of such columns, 1 head) with 128-byte swizzle.
// Strides in elements. Non-zero with the reason in `fail`.
int encode_map(CUtensorMap& map, const TokenTensor& tensor, Dtype dtype, int32_t tokens, int32_t heads, int32_t head_dim,
               int32_t box_tokens, int32_t box_columns);

// Map of fp32 [heads, planes, row] for boxes of box_elements of all planes of one head, no swizzle; `stride` floats between planes.
int encode_planes_map(CUtensorMap& map, void* data, int32_t row, int64_t stride, int32_t planes, int32_t heads, int32_t box_elements);

// Lets the kernel have that much shared memory on the current device; asked for once per device.
template <auto kKernel>
cudaError_t allow_shared(int bytes) {
    static std::atomic<uint64_t> allowed{0};  // one bit per device
    int device = 0;
    if (const auto status = cudaGetDevice(&device); status != cudaSuccess) return status;
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if (allowed.load(std::memory_order_relaxed) & bit) return cudaSuccess;
    const auto status = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
    return status;
}

// Launches and returns the status of this launch alone: cudaGetLastError would also tell errors that others left behind.
template <class Params>
cudaError_t start(void (*kernel)(Params), dim3 grid, int threads, size_t shared, cudaStream_t stream, const Params& params) {
    void* arguments[] = {const_cast<Params*>(&params)};
    return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(static_cast<unsigned>(threads)), arguments, shared, stream);
}

inline bool is_made_for(const Work& work, int32_t tile_rows, int32_t block_cols) {
    return work.tile_rows == tile_rows && work.block_cols == block_cols;
}

inline int refuse(const Work& work, const char* kernel) {
    return fail(std::string("the work list is for tiles of ") + std::to_string(work.tile_rows) + " rows and blocks of " +
                std::to_string(work.block_cols) + " columns, no " + kernel + " kernel has such; see the magi_ffa_*_tile functions");
}

// Of the scores. 0 would turn the -inf of a hidden score into NaN; this one gives the same weights.
inline float least_scale(const AttentionShape& shape) { return std::max(shape.softmax_scale, 1e-30f); }

// As many groups of heads together as stay in about half of an H200's L2, but enough for a section to end evenly by itself.
inline Schedule make_schedule(const Work& work, int32_t num_heads, int32_t heads_per_group, int64_t bytes_per_group, int32_t num_sms,
                              int32_t items_per_sm, int32_t* counter) {
    constexpr int64_t kBudget = int64_t{32} << 20;
    const int64_t in_cache = std::max<int64_t>(1, kBudget / std::max<int64_t>(bytes_per_group, 1));
    const int64_t items_per_group = std::max<int64_t>(1, int64_t{work.num_tiles} * heads_per_group);
    const int64_t even = (int64_t{items_per_sm} * num_sms + items_per_group - 1) / items_per_group;
    const auto section = static_cast<int32_t>(std::min<int64_t>(num_heads, std::max(in_cache, even) * heads_per_group));
    return {num_heads, section, work.num_tiles * num_heads, counter};
}

}  // namespace magi
