// Exact and estimated key traffic of an assignment. Knows nothing of how the assignment was found.
#include "solver/remote_rows.h"

#include <numeric>

namespace magi {

int64_t remote_rows_of_rank(const ChunkGrid& grid, const ChunkNeeds& needs, std::span<const int32_t> chunks, bool owns_keys,
                            Intervals& scratch) {
    scratch.clear();
    for (const int32_t chunk : chunks) {
        const auto own = needs.of(chunk);
        scratch.insert(scratch.end(), own.begin(), own.end());
    }
    normalize(scratch);
    int64_t rows = num_tokens(scratch);
    if (!owns_keys) return rows;
    size_t at = 0;
    for (const int32_t chunk : chunks) {
        const int64_t start = grid.start(chunk), end = grid.end(chunk);
        while (at < scratch.size() && scratch[at].end <= start) ++at;
        for (size_t i = at; i < scratch.size() && scratch[i].start < end; ++i)
            rows -= std::min<int64_t>(end, scratch[i].end) - std::max<int64_t>(start, scratch[i].start);
    }
    return rows;
}

RankChunks chunks_by_rank(std::span<const int32_t> owner, int32_t cp_size) {
    RankChunks by_rank;
    by_rank.first.assign(cp_size + 1, 0);
    for (const int32_t rank : owner) ++by_rank.first[rank + 1];
    std::partial_sum(by_rank.first.begin(), by_rank.first.end(), by_rank.first.begin());
    by_rank.chunks.resize(owner.size());
    std::vector<int64_t> cursor = by_rank.first;
    for (size_t chunk = 0; chunk < owner.size(); ++chunk) by_rank.chunks[cursor[owner[chunk]]++] = static_cast<int32_t>(chunk);
    return by_rank;
}

int64_t remote_rows(const ChunkGrid& grid, const ChunkNeeds& needs, std::span<const int32_t> owner, int32_t cp_size, bool owns_keys) {
    const RankChunks by_rank = chunks_by_rank(owner, cp_size);
    Intervals scratch;
    int64_t rows = 0;
    for (int32_t rank = 0; rank < cp_size; ++rank) rows += remote_rows_of_rank(grid, needs, by_rank.of(rank), owns_keys, scratch);
    return rows;
}

namespace {

constexpr int64_t kMinKeyCells = 1 << 16;

int64_t max_key(const ChunkNeeds& needs) {
    int64_t end = 0;
    for (const Interval need : needs.intervals) end = std::max<int64_t>(end, need.end);
    return end;
}

// Marks, for each key chunk, the outermost query chunk that sees it. Chunks are visited from the outside in, so the first mark
// is final and marked key chunks are skipped: near-linear.
std::vector<int64_t> outermost_reader(const ChunkNeeds& needs, int64_t n, const ChunkGrid& keys, bool is_last) {
    std::vector<int64_t> reader(keys.num_chunks(), -1), skip(keys.num_chunks() + 1);
    std::iota(skip.begin(), skip.end(), 0);
    const auto next_unmarked = [&](int64_t at) {
        while (skip[at] != at) at = skip[at] = skip[skip[at]];
        return at;
    };
    for (int64_t i = 0; i < n; ++i) {
        const int64_t chunk = is_last ? n - 1 - i : i;
        for (const Interval need : needs.of(chunk)) {
            const int64_t last = (need.end - 1) / keys.chunk_size;
            for (int64_t at = next_unmarked(need.start / keys.chunk_size); at <= last; at = next_unmarked(at)) {
                reader[at] = chunk;
                skip[at] = at + 1;
            }
        }
    }
    return reader;
}

}  // namespace

ChunkGrid key_cells(const ChunkNeeds& needs, const ChunkGrid& grid, int64_t max_cells) {
    const int64_t end = max_key(needs);
    return {end, std::max(grid.chunk_size, (end + max_cells - 1) / max_cells)};
}

std::vector<int64_t> border_rows(const ChunkGrid& grid, const ChunkNeeds& needs, bool owns_keys) {
    const int64_t n = grid.num_chunks();
    // Keys that have a place among the queries are cut as those are. Else there may be far more of them than queries.
    const ChunkGrid keys = owns_keys ? ChunkGrid{max_key(needs), grid.chunk_size} : key_cells(needs, grid, std::max(n, kMinKeyCells));
    const std::vector<int64_t> last = outermost_reader(needs, n, keys, true);
    const std::vector<int64_t> first = outermost_reader(needs, n, keys, false);
    // A key chunk adds its rows to every border between its own place (or its first reader's, when keys have no place among the
    // queries) and its outermost readers.
    std::vector<int64_t> rows(n + 2, 0);
    for (int64_t key = 0; key < keys.num_chunks(); ++key) {
        if (last[key] < 0) continue;
        const int64_t low = owns_keys ? std::min(first[key], key) : first[key];
        const int64_t high = owns_keys ? std::max(last[key], key) : last[key];
        if (low >= high || low >= n) continue;
        rows[low + 1] += keys.chunk_size;
        rows[std::min(high, n) + 1] -= keys.chunk_size;
    }
    for (int64_t border = 1; border <= n; ++border) rows[border] += rows[border - 1];
    rows.resize(n + 1);
    return rows;
}

}  // namespace magi
