// Owners of key chunks in cross attention: near the queries that read them, tokens bounded. Knows nothing of query areas.
#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <utility>

#include "solver/dispatch.h"
#include "solver/remote_rows.h"

namespace magi {

namespace {

constexpr size_t kReaders = 4;  // best ranks kept per key chunk: bounded memory also when every rank reads every key

struct Reader {
    int64_t rows = 0;
    int32_t rank = -1;
};
using Readers = std::array<Reader, kReaders>;

Intervals needs_of_rank(const ChunkNeeds& needs, std::span<const int32_t> chunks) {
    Intervals all;
    for (const int32_t chunk : chunks) {
        const auto own = needs.of(chunk);
        all.insert(all.end(), own.begin(), own.end());
    }
    normalize(all);
    return all;
}

void insert_reader(Readers& readers, Reader next) {
    for (Reader& kept : readers) {
        if (next.rows > kept.rows) std::swap(kept, next);  // ranks come in rising order, so equals keep the lower rank
    }
}

// rows_used(key chunk) of one rank, in ascending key chunks.
template <class Visit>
void for_each_used_chunk(std::span<const Interval> needs, const ChunkGrid& grid, Visit visit) {
    int64_t chunk = -1, rows = 0;
    for (const Interval need : needs) {
        for (int64_t at = need.start / grid.chunk_size; at <= (need.end - 1) / grid.chunk_size; ++at) {
            if (at != chunk && rows > 0) {
                visit(chunk, rows);
                rows = 0;
            }
            chunk = at;
            rows += std::min<int64_t>(need.end, grid.end(at)) - std::max<int64_t>(need.start, grid.start(at));
        }
    }
    if (rows > 0) visit(chunk, rows);
}

}  // namespace

Owners solve_key_dispatch(const KeyDispatchRequest& request) {
    const int64_t n = request.k_grid.num_chunks();
    DispatchDesc desc;
    desc.grid = request.k_grid;
    desc.cp_size = request.cp_size;
    desc.is_even = request.is_even;
    desc.areas.assign(n, 0);
    const Owners contiguous = contiguous_owners(desc);

    const ChunkNeeds needs = chunk_needs(request.slices, request.q_grid);
    const RankChunks q_chunks = chunks_by_rank(request.q_owner, request.cp_size);
    std::vector<Readers> readers(n);
    int64_t local_contiguous = 0;
    for (int32_t rank = 0; rank < request.cp_size; ++rank) {
        for_each_used_chunk(needs_of_rank(needs, q_chunks.of(rank)), request.k_grid, [&](int64_t chunk, int64_t rows) {
            insert_reader(readers[chunk], {rows, rank});
            if (contiguous[chunk] == rank) local_contiguous += rows;
        });
    }

    // The chunks with most to gain choose first; a rank takes no more than its share of tokens.
    std::vector<int32_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return readers[a][0].rows > readers[b][0].rows; });
    const BalanceLimits limits = balance_limits(desc);
    const int64_t max_chunks = request.is_even ? n / request.cp_size : n;
    std::vector<int64_t> tokens(request.cp_size, 0), chunks(request.cp_size, 0);
    Owners owner(n, -1);
    int64_t local_by_use = 0;
    const auto take = [&](int32_t chunk, int32_t rank) {
        owner[chunk] = rank;
        tokens[rank] += request.k_grid.tokens(chunk);
        ++chunks[rank];
    };
    for (const int32_t chunk : order) {
        for (const Reader& reader : readers[chunk]) {
            if (reader.rank < 0 || chunks[reader.rank] >= max_chunks) continue;
            if (tokens[reader.rank] + request.k_grid.tokens(chunk) > limits.max_tokens) continue;
            take(chunk, reader.rank);
            local_by_use += reader.rows;
            break;
        }
    }
    if (local_by_use <= local_contiguous) return contiguous;
    // Keys that found no reader with room go to the ranks with the fewest tokens.
    std::set<std::pair<int64_t, int32_t>> by_tokens;
    for (int32_t rank = 0; rank < request.cp_size; ++rank)
        if (chunks[rank] < max_chunks) by_tokens.emplace(tokens[rank], rank);
    for (int32_t chunk = 0; chunk < n; ++chunk) {
        if (owner[chunk] >= 0) continue;
        const int32_t lightest = by_tokens.extract(by_tokens.begin()).value().second;
        take(chunk, lightest);
        if (chunks[lightest] < max_chunks) by_tokens.emplace(tokens[lightest], lightest);
    }
    return owner;
}

}  // namespace magi
