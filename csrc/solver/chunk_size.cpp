// Tries chunk sizes from large to small. Knows no algorithm from inside.
#include "solver/chunk_size.h"

#include <bit>
#include <optional>

namespace magi {

namespace {

constexpr int64_t kUnit = 128;               // rows of a kernel tile
constexpr int64_t kShortChunksPerRank = 16;  // below kUnit tokens per chunk we do not go past this many
constexpr int kFinerTries = 3;               // sizes looked at below the first that balances

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
    if (total_tokens % cp_size == 0) sizes.push_back(total_tokens / cp_size);  // documents that match ranks match this grid
    for (int64_t parts = cp_size;; parts *= 2) {
        const int64_t size = ((total_tokens + parts - 1) / parts + unit - 1) / unit * unit;
        if (sizes.empty() || size < sizes.back()) sizes.push_back(size);
        if (size <= unit || parts >= total_tokens) return sizes;
    }
}

namespace {

// Grids to try, falling chunk sizes, with their areas. Coarser grids add up the areas of the finest one where the sizes nest.
std::vector<DispatchDesc> candidate_grids(const DispatchRequest& request) {
    if (request.chunk_size > 0) {
        std::vector<DispatchDesc> one{make_desc(request, request.chunk_size)};
        one[0].areas = chunk_areas(request.slices, one[0].grid);
        return one;
    }
    const ChunkGrid finest{request.total_tokens, chunk_unit(request.total_tokens, request.cp_size)};
    const std::vector<int64_t> finest_areas = chunk_areas(request.slices, finest);
    std::vector<DispatchDesc> grids;
    const std::vector<int64_t> sizes = candidate_chunk_sizes(request.total_tokens, request.cp_size, request.is_even);
    for (const int64_t size : sizes) {
        DispatchDesc desc = make_desc(request, size);
        // Two runs per rank need two chunks per rank, if there are that many at all.
        const bool is_too_coarse = request.algorithm == DispatchAlgorithm::kZigzag && desc.grid.num_chunks() < 2 * request.cp_size;
        if (is_too_coarse && size != sizes.back()) continue;
        const int64_t group = size / finest.chunk_size;
        if (size % finest.chunk_size != 0) {
            desc.areas = chunk_areas(request.slices, desc.grid);
        } else {
            desc.areas.assign(desc.grid.num_chunks(), 0);
            for (size_t chunk = 0; chunk < finest_areas.size(); ++chunk) desc.areas[chunk / group] += finest_areas[chunk];
        }
        grids.push_back(std::move(desc));
    }
    return grids;
}

int64_t largest_area(const DispatchDesc& desc) { return desc.areas.empty() ? 0 : *std::max_element(desc.areas.begin(), desc.areas.end()); }

// Leaves out grids on which no assignment can balance because one chunk alone is too large; when that holds for all, keeps those
// whose largest chunk is near the smallest possible, so that nobody gets tiny chunks for nothing.
std::vector<DispatchDesc> promising(std::vector<DispatchDesc> grids) {
    int64_t smallest = largest_area(grids.front());
    for (const DispatchDesc& desc : grids) smallest = std::min(smallest, largest_area(desc));
    const int64_t bound = std::max(balance_limits(grids.front()).max_area, smallest + smallest / 20);
    std::erase_if(grids, [&](const DispatchDesc& desc) { return largest_area(desc) > bound; });
    return grids;
}

}  // namespace

DispatchOutcome solve_dispatch(const DispatchRequest& request) {
    std::vector<DispatchDesc> grids = candidate_grids(request);
    const BalanceLimits limits = balance_limits(grids.back());  // of the finest, so that coarse ones are not excused
    const bool is_fixed_layout = ignores_mask(request.algorithm);
    if (!is_fixed_layout) grids = promising(std::move(grids));
    std::optional<DispatchOutcome> best;
    int finer_tries = 0;
    for (DispatchDesc& desc : grids) {
        const ChunkNeeds needs = chunk_needs(request.slices, desc.grid);
        desc.needs = &needs;
        DispatchOutcome outcome = solve_on_grid(desc, request);
        if (is_fixed_layout) {
            // Only its tokens depend on the chunk size.
            if (!best || outcome.max_tokens < best->max_tokens) best = std::move(outcome);
            if (best->max_tokens <= limits.mean_tokens + limits.mean_tokens / 50) break;
            continue;
        }
        if (!best || is_worth_finer(outcome, *best, limits)) best = std::move(outcome);
        if (!is_balanced(*best, limits)) continue;
        if (best->remote_rows <= request.total_tokens / 16 || finer_tries++ == kFinerTries) break;
    }
    return std::move(*best);
}

}  // namespace magi
