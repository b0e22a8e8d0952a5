// Tries chunk sizes from large to small. Knows no algorithm from inside.
#include "solver/chunk_size.h"

#include <bit>
#include <optional>

namespace magi {

namespace {

constexpr int64_t kUnit = 128;               // rows of a kernel tile
constexpr int64_t kShortChunksPerRank = 16;  // below kUnit tokens per chunk we do not go past this many

bool ignores_mask(DispatchAlgorithm algorithm) {
    return algorithm == DispatchAlgorithm::kContiguous || algorithm == DispatchAlgorithm::kZigzag;
}

// The multiple that chunk sizes keep: 128, or less when 128 would leave a rank only a few chunks.
int64_t chunk_unit(int64_t total_tokens, int32_t cp_size) {
    const int64_t wanted = std::max<int64_t>(1, total_tokens / (cp_size * kShortChunksPerRank));
    return std::min<int64_t>(kUnit, static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(wanted))));
}

DispatchDesc make_desc(const DispatchRequest& request, int64_t chunk_size) {
    DispatchDesc desc;
    desc.grid = {request.total_tokens, chunk_size};
    desc.cp_size = request.cp_size;
    desc.is_even = request.is_even;
    desc.owns_keys = request.owns_keys;
    return desc;
}

}  // namespace

std::vector<int64_t> candidate_chunk_sizes(int64_t total_tokens, int32_t cp_size, bool is_even) {
    std::vector<int64_t> sizes;
    if (total_tokens == 0) return {1};
    const int64_t unit = chunk_unit(total_tokens, cp_size);
    if (is_even) {
        // Whole chunks only: divisors of the tokens per rank.
        const int64_t tokens_per_rank = total_tokens / cp_size;
        for (int64_t parts = 1; parts <= tokens_per_rank; parts *= 2) {
            if (tokens_per_rank % parts != 0 || (parts > 1 && tokens_per_rank / parts < unit)) break;
            sizes.push_back(tokens_per_rank / parts);
        }
        return sizes;
    }
    for (int64_t parts = cp_size;; parts *= 2) {
        const int64_t size = ((total_tokens + parts - 1) / parts + unit - 1) / unit * unit;
        if (sizes.empty() || size < sizes.back()) sizes.push_back(size);
        if (size <= unit) return sizes;
    }
}

DispatchOutcome solve_dispatch(const DispatchRequest& request) {
    const std::vector<int64_t> sizes = request.chunk_size > 0
                                           ? std::vector<int64_t>{request.chunk_size}
                                           : candidate_chunk_sizes(request.total_tokens, request.cp_size, request.is_even);
    // Coarser grids add up the areas of the finest one where the sizes nest.
    const ChunkGrid finest{request.total_tokens,
                           request.chunk_size > 0 ? request.chunk_size : chunk_unit(request.total_tokens, request.cp_size)};
    const std::vector<int64_t> finest_areas = chunk_areas(request.slices, finest);
    std::optional<DispatchOutcome> best;
    bool was_balanced = false;
    for (const int64_t size : sizes) {
        DispatchDesc desc = make_desc(request, size);
        if (size % finest.chunk_size == 0) {
            desc.areas.assign(desc.grid.num_chunks(), 0);
            const int64_t group = size / finest.chunk_size;
            for (size_t chunk = 0; chunk < finest_areas.size(); ++chunk) desc.areas[chunk / group] += finest_areas[chunk];
        } else {
            desc.areas = chunk_areas(request.slices, desc.grid);
        }
        const BalanceLimits limits = balance_limits(desc);
        const int64_t largest = desc.areas.empty() ? 0 : *std::max_element(desc.areas.begin(), desc.areas.end());
        const bool is_last = size == sizes.back();
        if (!is_last && !ignores_mask(request.algorithm) && largest > limits.max_area) continue;  // no assignment can balance
        const ChunkNeeds needs = chunk_needs(request.slices, desc.grid);
        desc.needs = &needs;
        DispatchOutcome outcome = solve_on_grid(desc, request);
        // A fixed layout is judged by its tokens, which is all that the chunk size can change in it.
        const bool is_enough = ignores_mask(request.algorithm) ? outcome.max_tokens <= limits.mean_tokens + limits.mean_tokens / 50
                                                               : is_balanced(outcome, limits);
        if (!best || is_better_outcome(outcome, *best, limits)) best = std::move(outcome);
        if (was_balanced || (is_enough && (ignores_mask(request.algorithm) || best->remote_rows == 0))) break;
        was_balanced = is_enough;
    }
    return std::move(*best);
}

}  // namespace magi
