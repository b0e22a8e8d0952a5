// What the backward adds to the products of every (query, head): -lse in units of the raw scores (with a softcap in base 2, after the cap)
// and -delta, head-major so that a block loads them in one copy.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/launch.h"

namespace magi {

// Floats between the rows of stats [num_heads_q, 2, stride]; a multiple of 16 bytes for the copy engine.
inline int64_t stats_stride(int32_t total_q) { return (int64_t{total_q} + 3) / 4 * 4; }

// Fills args.stats from lse and delta; computes delta first when args.out is given. One kernel.
int make_stats(const BackwardArgs& args, cudaStream_t stream);

}  // namespace magi
