// Gives chunks of query rows to ranks: the largest area first, then equal tokens, then few remote key rows.
// Every algorithm is one function from a DispatchDesc to owners; integers only, ties broken by chunk and rank id.
// Knows nothing of exchanges, steps or kernels.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "solver/chunk_area.h"

namespace magi {

// Order shared with magi_attention/plan/dispatch.py.
enum class DispatchAlgorithm : int32_t {
    kContiguous = 0,
    kZigzag = 1,
    kSortedSequential = 2,
    kMinHeap = 3,
    kToppHeap = 4,
    kLowerBound = 5,
    kDynamicProgramming = 6,
    kBinarySearch = 7,
};
inline constexpr int32_t kNumDispatchAlgorithms = 8;

using Owners = std::vector<int32_t>;  // [num_chunks], rank of each chunk

// One assignment problem on a fixed grid.
struct DispatchDesc {
    ChunkGrid grid;
    int32_t cp_size = 1;
    bool is_even = false;               // every rank must own the same number of chunks
    bool owns_keys = true;              // self attention: a rank's own rows are local keys
    std::vector<int64_t> areas;         // [num_chunks]
    const ChunkNeeds* needs = nullptr;  // of the same grid

    int64_t num_chunks() const { return static_cast<int64_t>(areas.size()); }
};

// Price of one more remote key row in visible pairs, where the two are traded within the limits: about the local queries a fetched row
// must meet to be hidden (cost model of the exchange; a power of two near 210).
inline constexpr int64_t kPairsPerRow = 256;

// What balance is worth: areas up to `max_area` and tokens up to `max_tokens` per rank count as balanced.
struct BalanceLimits {
    int64_t mean_area = 0, max_area = 0;      // ceil of the mean, 1.02 of it
    int64_t mean_tokens = 0, max_tokens = 0;  // ceil of the mean, 1.05 of it or one chunk more
};
BalanceLimits balance_limits(const DispatchDesc& desc);

// Loads of an assignment.
struct RankLoads {
    std::vector<int64_t> area, tokens;
    int64_t max_area = 0, max_tokens = 0;
};
RankLoads rank_loads(const DispatchDesc& desc, std::span<const int32_t> owner);

// ---- fixed layouts and contiguous cuts ----
Owners contiguous_owners(const DispatchDesc& desc);
Owners zigzag_owners(const DispatchDesc& desc);
// Smallest possible largest area of cp_size contiguous runs, found in two ways.
int64_t min_max_area_by_search(std::span<const int64_t> areas, int32_t cp_size);
int64_t min_max_area_by_programming(std::span<const int64_t> areas, int32_t cp_size);
// Contiguous runs none of which passes max_area (which must be possible), cut as close to equal shares as that allows.
Owners cut_owners(const DispatchDesc& desc, int64_t max_area);

// ---- heaps ----
Owners sorted_sequential_owners(const DispatchDesc& desc);
// Falling area to the least loaded rank; a rank at max_tokens takes no more while another can.
Owners heap_owners(const DispatchDesc& desc, int64_t max_tokens);
// top_p_ppm: share of the least loaded ranks looked at, in parts per million.
Owners topp_heap_owners(const DispatchDesc& desc, int64_t max_tokens, int64_t top_p_ppm);

// ---- few runs per rank, area and tokens both balanced ----
Owners ring_cut_owners(const DispatchDesc& desc, const BalanceLimits& limits);

// ---- the whole ----
enum class DispatchWay : int32_t { kNamed = 0, kContiguousCut = 1, kRingCut = 2, kHeap = 3 };

struct DispatchOutcome {
    Owners owner;
    int64_t chunk_size = 1;
    DispatchWay way = DispatchWay::kNamed;
    int64_t max_area = 0, total_area = 0, max_tokens = 0;
    int64_t remote_rows = 0;
};

struct DispatchRequest {
    std::span<const Slice> slices;
    int64_t total_tokens = 0;
    int64_t chunk_size = 0;  // 0: chosen here
    int32_t cp_size = 1;
    bool is_even = false;
    bool owns_keys = true;
    DispatchAlgorithm algorithm = DispatchAlgorithm::kMinHeap;
    int64_t top_p_ppm = 200000;
};
DispatchOutcome solve_dispatch(const DispatchRequest& request);

// Owners of key chunks for cross attention: by use with bounded tokens, or contiguous when that receives no more rows.
struct KeyDispatchRequest {
    std::span<const Slice> slices;
    ChunkGrid q_grid;
    std::span<const int32_t> q_owner;
    ChunkGrid k_grid;
    int32_t cp_size = 1;
    bool is_even = false;
};
Owners solve_key_dispatch(const KeyDispatchRequest& request);

}  // namespace magi
