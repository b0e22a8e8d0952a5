// What each chunk of query rows costs (visible pairs) and which keys it needs.
// Knows nothing of ranks: who owns a chunk is decided in dispatch.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/slice.h"
#include "solver/intervals.h"

namespace magi {

// Tokens cut in chunks of equal size; the last one may be short.
struct ChunkGrid {
    int64_t total_tokens = 0;
    int64_t chunk_size = 1;

    int64_t num_chunks() const { return (total_tokens + chunk_size - 1) / chunk_size; }
    int64_t start(int64_t chunk) const { return chunk * chunk_size; }
    int64_t end(int64_t chunk) const { return std::min(total_tokens, (chunk + 1) * chunk_size); }
    int64_t tokens(int64_t chunk) const { return end(chunk) - start(chunk); }
};

// Keys each chunk sees: normalized intervals, those of chunk c at [first[c], first[c + 1]).
struct ChunkNeeds {
    std::vector<int64_t> first;
    Intervals intervals;

    std::span<const Interval> of(int64_t chunk) const {
        return std::span(intervals).subspan(first[chunk], first[chunk + 1] - first[chunk]);
    }
};

// Visible pairs of each chunk. Linear in slices + (slice, chunk) pairs that touch. Slices may lie in any order.
std::vector<int64_t> chunk_areas(std::span<const Slice> slices, const ChunkGrid& grid);

// Keys seen by each chunk; the same cost plus a sort inside each chunk.
ChunkNeeds chunk_needs(std::span<const Slice> slices, const ChunkGrid& grid);

}  // namespace magi
