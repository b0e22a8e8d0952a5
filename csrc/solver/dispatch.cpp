// Runs one algorithm on one grid, and chooses among the ways of the default one. Chunk sizes come from chunk_size.h.
#include "solver/dispatch.h"

#include <optional>
#include <string>

#include "base/arrays.h"
#include "solver/chunk_size.h"
#include "solver/local_search.h"
#include "solver/remote_rows.h"

namespace magi {

BalanceLimits balance_limits(const DispatchDesc& desc) {
    const auto ceil_mean = [&](int64_t total) { return (total + desc.cp_size - 1) / desc.cp_size; };
    int64_t total_area = 0;
    for (const int64_t area : desc.areas) total_area += area;
    BalanceLimits limits;
    limits.mean_area = ceil_mean(total_area);
    limits.max_area = std::max(limits.mean_area, (total_area + total_area / 50) / desc.cp_size);
    limits.mean_tokens = ceil_mean(desc.grid.total_tokens);
    const int64_t whole_chunks = ceil_mean(desc.num_chunks()) * desc.grid.chunk_size;
    limits.max_tokens = std::max(limits.mean_tokens + limits.mean_tokens / 20, whole_chunks);
    return limits;
}

RankLoads rank_loads(const DispatchDesc& desc, std::span<const int32_t> owner) {
    RankLoads loads;
    loads.area.assign(desc.cp_size, 0);
    loads.tokens.assign(desc.cp_size, 0);
    for (size_t chunk = 0; chunk < owner.size(); ++chunk) {
        loads.area[owner[chunk]] += desc.areas[chunk];
        loads.tokens[owner[chunk]] += desc.grid.tokens(static_cast<int64_t>(chunk));
    }
    loads.max_area = *std::max_element(loads.area.begin(), loads.area.end());
    loads.max_tokens = *std::max_element(loads.tokens.begin(), loads.tokens.end());
    return loads;
}

namespace {

// Work bounds of the searches, in chunk pairs and key intervals looked at: some milliseconds each.
constexpr int64_t kBalanceWork = 1 << 20;
constexpr int64_t kLowerBoundWork = int64_t{1} << 26;
constexpr int64_t kLocalityWork = 1 << 18;
constexpr int64_t kWorkPerChunk = 64;

// Per cent of the mean above the limit, rounded up; 0 when within it.
int64_t excess(int64_t value, int64_t limit, int64_t mean, int64_t step_percent) {
    if (value <= limit) return 0;
    const int64_t step = std::max<int64_t>(1, mean / 100 * step_percent);
    return (value - limit + step - 1) / step;
}

// Area first, then tokens, in steps coarse enough that noise does not outweigh key rows.
std::pair<int64_t, int64_t> imbalance(const DispatchOutcome& outcome, const BalanceLimits& limits) {
    return {excess(outcome.max_area, limits.max_area, limits.mean_area, 1),
            excess(outcome.max_tokens, limits.max_tokens, limits.mean_tokens, 5)};
}

DispatchOutcome outcome_of(const DispatchDesc& desc, Owners owner, DispatchWay way) {
    const RankLoads loads = rank_loads(desc, owner);
    DispatchOutcome outcome;
    outcome.chunk_size = desc.grid.chunk_size;
    outcome.way = way;
    outcome.max_area = loads.max_area;
    outcome.max_tokens = loads.max_tokens;
    for (const int64_t area : loads.area) outcome.total_area += area;
    outcome.remote_rows = remote_rows(desc.grid, *desc.needs, owner, desc.cp_size, desc.owns_keys);
    outcome.owner = std::move(owner);
    return outcome;
}

// The default: several starts, each improved; balance decides, then tokens, then key rows, then the earlier one.
DispatchOutcome min_heap_outcome(const DispatchDesc& desc) {
    const BalanceLimits limits = balance_limits(desc);
    const int64_t n = desc.num_chunks(), balance_work = kBalanceWork + kWorkPerChunk * n;
    std::optional<DispatchOutcome> best;
    const auto offer = [&](Owners owner, DispatchWay way) {
        DispatchOutcome outcome = outcome_of(desc, std::move(owner), way);
        if (!best || is_better_outcome(outcome, *best, limits)) best = std::move(outcome);
    };
    if (desc.is_even)
        offer(contiguous_owners(desc), DispatchWay::kContiguousCut);
    else
        offer(cut_owners(desc, std::max(limits.max_area, min_max_area_by_search(desc.areas, desc.cp_size))), DispatchWay::kContiguousCut);
    if (n >= desc.cp_size) {
        Owners owner = ring_cut_owners(desc, limits);
        balance_search(desc, limits.max_area, limits.max_tokens, balance_work, owner);
        offer(std::move(owner), DispatchWay::kRingCut);
    }
    if (!is_balanced(*best, limits)) {
        for (const int64_t max_tokens : {limits.max_tokens, desc.grid.total_tokens}) {
            Owners owner = heap_owners(desc, max_tokens);
            balance_search(desc, limits.max_area, max_tokens, balance_work, owner);
            locality_search(desc, limits, kLocalityWork + kWorkPerChunk * n, owner);
            offer(std::move(owner), DispatchWay::kHeap);
            if (desc.is_even || is_balanced(*best, limits)) break;
        }
    }
    if (best->remote_rows > 0) {
        locality_search(desc, limits, kLocalityWork, best->owner);
        best = outcome_of(desc, std::move(best->owner), best->way);
    }
    return std::move(*best);
}

}  // namespace

bool is_balanced(const DispatchOutcome& outcome, const BalanceLimits& limits) {
    return outcome.max_area <= limits.max_area && outcome.max_tokens <= limits.max_tokens;
}

bool is_better_outcome(const DispatchOutcome& a, const DispatchOutcome& b, const BalanceLimits& limits) {
    return std::pair(imbalance(a, limits), a.remote_rows) < std::pair(imbalance(b, limits), b.remote_rows);
}

bool is_worth_finer(const DispatchOutcome& finer, const DispatchOutcome& coarser, const BalanceLimits& limits) {
    if (imbalance(finer, limits) != imbalance(coarser, limits)) return imbalance(finer, limits) < imbalance(coarser, limits);
    return finer.remote_rows < coarser.remote_rows - coarser.remote_rows / 16;
}

DispatchOutcome solve_on_grid(const DispatchDesc& desc, const DispatchRequest& request) {
    const BalanceLimits limits = balance_limits(desc);
    const auto named = [&](Owners owner) { return outcome_of(desc, std::move(owner), DispatchWay::kNamed); };
    switch (request.algorithm) {
        case DispatchAlgorithm::kContiguous:
            return named(contiguous_owners(desc));
        case DispatchAlgorithm::kZigzag:
            return named(zigzag_owners(desc));
        case DispatchAlgorithm::kSortedSequential:
            return named(sorted_sequential_owners(desc));
        case DispatchAlgorithm::kMinHeap:
            return min_heap_outcome(desc);
        case DispatchAlgorithm::kToppHeap:
            return named(topp_heap_owners(desc, limits.max_tokens, request.top_p_ppm));
        case DispatchAlgorithm::kLowerBound: {
            Owners owner = heap_owners(desc, desc.grid.total_tokens);
            balance_search(desc, limits.mean_area, desc.grid.total_tokens, kLowerBoundWork, owner);
            return named(std::move(owner));
        }
        case DispatchAlgorithm::kDynamicProgramming:
            if (desc.is_even) return named(contiguous_owners(desc));
            return named(cut_owners(desc, min_max_area_by_programming(desc.areas, desc.cp_size)));
        case DispatchAlgorithm::kBinarySearch:
            if (desc.is_even) return named(contiguous_owners(desc));
            return named(cut_owners(desc, min_max_area_by_search(desc.areas, desc.cp_size)));
    }
    throw InputError("algorithm=" + std::to_string(static_cast<int32_t>(request.algorithm)) + " is not a dispatch algorithm");
}

}  // namespace magi
