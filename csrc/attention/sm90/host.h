// What the launchers share on the host: errors of this thread, tensor maps, schedules. CUDA runtime only; the driver's encoder is found at run time.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "attention/launch.h"
#include "attention/sm90/schedule.cuh"

namespace magi {

// Remembers why a call of this thread failed; returns 1.
int fail(const std::string& reason);
int fail(const char* what, cudaError_t status);

struct MapBox {
    int32_t elements, tokens;  // elements * size must be 128 bytes: the swizzle's width
};

// Map of [tokens, heads, head_dim] for boxes of one head. Strides in elements. Non-zero with the reason in `fail`.
int encode_map(CUtensorMap& map, const TokenTensor& tensor, Dtype dtype, int32_t tokens, int32_t heads, int32_t head_dim, MapBox box);

// Groups of heads whose keys and values stay in about half of an H200's L2 together.
inline Schedule make_schedule(const Work& work, int32_t num_heads, int32_t heads_per_group, int64_t bytes_per_group, int32_t* counter) {
    constexpr int64_t kBudget = int64_t{32} << 20;
    const int64_t groups = std::max<int64_t>(1, kBudget / std::max<int64_t>(bytes_per_group, 1));
    const auto section = static_cast<int32_t>(std::min<int64_t>(num_heads, groups * heads_per_group));
    return {num_heads, section, work.num_tiles * num_heads, counter};
}

}  // namespace magi
