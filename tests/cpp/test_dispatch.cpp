// Invariants of every dispatch algorithm: one owner per chunk, optimal cuts, balance, volume, determinism.
#include "solver/dispatch.h"

#include <limits>

#include "check.h"
#include "solver/chunk_size.h"
#include "solver/local_search.h"
#include "solver/remote_rows.h"

using namespace magi;
using namespace magi::test;

namespace {

DispatchRequest request_of(std::span<const Slice> slices, int64_t total, int32_t cp_size) {
    DispatchRequest request;
    request.slices = slices;
    request.total_tokens = total;
    request.cp_size = cp_size;
    return request;
}

int64_t brute_min_max(std::span<const int64_t> areas, int32_t parts) {
    int64_t total = 0;
    for (const int64_t area : areas) total += area;
    if (parts == 1) return total;
    int64_t best = std::numeric_limits<int64_t>::max(), head = 0;
    for (size_t cut = 0; cut <= areas.size(); ++cut) {
        best = std::min(best, std::max(head, brute_min_max(areas.subspan(cut), parts - 1)));
        if (cut < areas.size()) head += areas[cut];
    }
    return best;
}

void check_cuts(Random& random) {
    for (int round = 0; round < 300; ++round) {
        std::vector<int64_t> areas(random.between(0, 9));
        for (int64_t& area : areas) area = random.between(0, 3) == 0 ? 0 : random.between(0, 40);
        const auto cp_size = static_cast<int32_t>(random.between(1, 4));
        const int64_t best = min_max_area_by_search(areas, cp_size);
        CHECK_EQUAL(best, brute_min_max(areas, cp_size));
        CHECK_EQUAL(min_max_area_by_programming(areas, cp_size), best);
        DispatchDesc desc;
        desc.grid = {static_cast<int64_t>(areas.size()), 1};
        desc.cp_size = cp_size;
        desc.areas = areas;
        const Owners owner = cut_owners(desc, best);
        CHECK(std::is_sorted(owner.begin(), owner.end()));
        CHECK(rank_loads(desc, owner).max_area <= best);
    }
}

void check_every_algorithm(Random& random) {
    for (const int32_t cp_size : {1, 3, 6, 24, 48, 96, 128, 144, 160, 1024}) {
        std::vector<int32_t> lengths(random.between(0, 12));
        int64_t total = 0;
        for (int32_t& length : lengths) total += length = static_cast<int32_t>(random.between(0, 900));
        const std::vector<Slice> slices = causal_documents(lengths);
        for (int32_t algorithm = 0; algorithm < kNumDispatchAlgorithms; ++algorithm) {
            for (const int64_t chunk_size : {int64_t{0}, int64_t{1}, int64_t{37}, int64_t{5000}}) {
                DispatchRequest request = request_of(slices, total, cp_size);
                request.chunk_size = chunk_size;
                request.algorithm = static_cast<DispatchAlgorithm>(algorithm);
                const DispatchOutcome outcome = solve_dispatch(request);
                const ChunkGrid grid{total, outcome.chunk_size};
                CHECK(outcome.chunk_size >= 1 && (chunk_size == 0 || outcome.chunk_size == chunk_size));
                CHECK_EQUAL(static_cast<int64_t>(outcome.owner.size()), grid.num_chunks());
                for (const int32_t rank : outcome.owner) CHECK(rank >= 0 && rank < cp_size);
                CHECK(solve_dispatch(request).owner == outcome.owner);
                const int64_t area_total = [&] {
                    int64_t sum = 0;
                    for (const Slice& s : slices) sum += area(s);
                    return sum;
                }();
                CHECK_EQUAL(outcome.total_area, area_total);
                CHECK(outcome.max_area * cp_size >= area_total);
            }
        }
    }
}

void check_even_shares(Random& random) {
    for (int round = 0; round < 40; ++round) {
        const auto cp_size = static_cast<int32_t>(random.between(1, 9));
        const int64_t chunk_size = random.between(1, 9), per_rank = random.between(0, 7), total = cp_size * chunk_size * per_rank;
        const auto half = static_cast<int32_t>(total / 3);
        const std::vector<Slice> slices = causal_documents({half, static_cast<int32_t>(total) - half});
        for (int32_t algorithm = 0; algorithm < kNumDispatchAlgorithms; ++algorithm) {
            for (const int64_t asked : {chunk_size, int64_t{0}}) {
                DispatchRequest request = request_of(slices, total, cp_size);
                request.chunk_size = asked;
                request.is_even = true;
                request.algorithm = static_cast<DispatchAlgorithm>(algorithm);
                const DispatchOutcome outcome = solve_dispatch(request);
                std::vector<int64_t> chunks(cp_size, 0);
                for (const int32_t rank : outcome.owner) ++chunks[rank];
                for (const int64_t count : chunks) CHECK_EQUAL(count * outcome.chunk_size, total / cp_size);
            }
        }
    }
}

void check_volumes() {
    const std::vector<Slice> documents = causal_documents(std::vector<int32_t>(8, 1024));
    const DispatchOutcome matched = solve_dispatch(request_of(documents, 8192, 8));
    CHECK_EQUAL(matched.remote_rows, 0);
    CHECK_EQUAL(matched.max_area * 8, matched.total_area);
    // 24 documents, three per rank; the middle ones would be cut by an unlucky chunk grid.
    CHECK_EQUAL(solve_dispatch(request_of(causal_documents(std::vector<int32_t>(24, 640)), 24 * 640, 8)).remote_rows, 0);

    const std::vector<Slice> window{{0, 8192, 0, 8192, -127, 0}};
    const DispatchOutcome outcome = solve_dispatch(request_of(window, 8192, 8));
    CHECK_EQUAL(outcome.remote_rows, 7 * 127);
    CHECK(outcome.max_area * 8 * 100 <= outcome.total_area * 102);
}

// A search may only improve, and must report what it did in the owners.
void check_searches(Random& random) {
    for (int round = 0; round < 100; ++round) {
        std::vector<int32_t> lengths(random.between(1, 8));
        int64_t total = 0;
        for (int32_t& length : lengths) total += length = static_cast<int32_t>(random.between(1, 60));
        const std::vector<Slice> slices = causal_documents(lengths);
        DispatchDesc desc;
        desc.grid = {total, random.between(1, 9)};
        desc.cp_size = static_cast<int32_t>(random.between(1, 6));
        desc.areas = chunk_areas(slices, desc.grid);
        const ChunkNeeds needs = chunk_needs(slices, desc.grid);
        desc.needs = &needs;
        const BalanceLimits limits = balance_limits(desc);
        Owners owner(desc.num_chunks());
        for (int32_t& rank : owner) rank = static_cast<int32_t>(random.between(0, desc.cp_size - 1));
        const RankLoads before = rank_loads(desc, owner);
        balance_search(desc, limits.mean_area, total, 1 << 16, owner);
        const RankLoads balanced = rank_loads(desc, owner);
        CHECK(balanced.max_area <= before.max_area);
        const int64_t rows_before = remote_rows(desc.grid, needs, owner, desc.cp_size, true);
        locality_search(desc, limits, 1 << 16, owner);
        const RankLoads after = rank_loads(desc, owner);
        CHECK(remote_rows(desc.grid, needs, owner, desc.cp_size, true) <= rows_before);
        CHECK(after.max_area <= std::max(limits.max_area, balanced.max_area));
        CHECK(after.max_tokens <= std::max(limits.max_tokens, balanced.max_tokens));
    }
}

}  // namespace

int main() {
    Random random(5);
    check_cuts(random);
    check_every_algorithm(random);
    check_even_shares(random);
    check_volumes();
    check_searches(random);
    return report("dispatch");
}
