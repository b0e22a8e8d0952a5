// Counts the key rows ranks receive under an assignment, exactly, without building an exchange.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "solver/chunk_area.h"

namespace magi {

// Rows of one rank that owns the given ascending chunks: keys it needs, without those in its own chunks when owns_keys.
// `scratch` is reused memory.
int64_t remote_rows_of_rank(const ChunkGrid& grid, const ChunkNeeds& needs, std::span<const int32_t> chunks, bool owns_keys,
                            Intervals& scratch);

// Sum over all ranks.
int64_t remote_rows(const ChunkGrid& grid, const ChunkNeeds& needs, std::span<const int32_t> owner, int32_t cp_size, bool owns_keys);

// Ascending chunks of every rank: those of rank r at [first[r], first[r + 1]).
struct RankChunks {
    std::vector<int64_t> first;
    std::vector<int32_t> chunks;

    std::span<const int32_t> of(int64_t rank) const { return std::span(chunks).subspan(first[rank], first[rank + 1] - first[rank]); }
};
RankChunks chunks_by_rank(std::span<const int32_t> owner, int32_t cp_size);

// The needed keys in cells of at least a chunk, at most max_cells of them: bounded work also where keys outnumber queries by far.
ChunkGrid key_cells(const ChunkNeeds& needs, const ChunkGrid& grid, int64_t max_cells);

// Estimate of the rows that travel because ranks change between chunk b - 1 and chunk b, for b in [0, num_chunks]:
// key rows on one side that some query on the other side sees, counted in whole chunks or cells. 0 exactly where nothing crosses.
std::vector<int64_t> border_rows(const ChunkGrid& grid, const ChunkNeeds& needs, bool owns_keys);

}  // namespace magi
