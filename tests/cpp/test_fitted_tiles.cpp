// Fitted tiles: the rule written again cell by cell, lists that are never dearer than uniform ones, and where known masks are cut.
#include "solver/fitted_tiles.h"

#include <algorithm>
#include <set>

#include "base/tile_cost.h"
#include "check.h"

using namespace magi;
using namespace magi::test;

namespace {

constexpr int32_t kCells = 60;
using Cuts = std::vector<int32_t>;

Cuts uniform(int32_t num_rows, int32_t tile_rows) {
    Cuts cuts;
    for (int32_t row = 0; row < num_rows; row += tile_rows) cuts.push_back(row);
    cuts.push_back(num_rows);
    return cuts;
}

int64_t slow_cost(const std::vector<Slice>& slices, int32_t begin, int32_t end, int32_t block_cols) {
    int64_t num_blocks = 0;
    for (int32_t col = 0, run = 0; col <= kCells; ++col) {
        bool is_seen = false;
        for (int32_t row = begin; row < end && col < kCells; ++row)
            for (const Slice& slice : slices) is_seen = is_seen || sees(slice, row, col);
        run = is_seen ? run + 1 : 0;
        if (run % block_cols == 1 || (is_seen && block_cols == 1)) ++num_blocks;
    }
    return num_blocks ? kInteriorBlockCost * num_blocks + kTileCost : 0;
}

Cuts slow_cuts(const std::vector<Slice>& slices, int32_t tile_rows, int32_t block_cols) {
    std::set<int32_t> borders;
    for (Slice slice : slices) {
        if (!tighten(slice)) continue;
        borders.insert({slice.q_start, slice.q_end});
    }
    Cuts cuts{0};
    while (cuts.back() < kCells) {
        const int32_t begin = cuts.back();
        int32_t end = std::min(begin + tile_rows, kCells), last = -1;
        for (const int32_t border : borders)
            if (begin < border && border < end) last = border;
        if (last >= 0) {
            const int32_t next_end = std::min(last + tile_rows, kCells);
            const double share = static_cast<double>(end - last) / (next_end - last);
            const double fitted = static_cast<double>(slow_cost(slices, begin, last, block_cols)) +
                                  share * static_cast<double>(slow_cost(slices, last, next_end, block_cols));
            const bool may_cost_more = end < kCells && !borders.contains(end);
            const auto limit = slow_cost(slices, begin, end, block_cols) + (may_cost_more ? kInteriorBlockCost : 0);
            if (fitted <= static_cast<double>(limit) + 1e-6) end = last;
        }
        cuts.push_back(end);
    }
    return cuts;
}

// Random slices without a doubly covered cell.
std::vector<Slice> random_mask(Random& random) {
    std::vector<Slice> kept;
    for (int round = 0; round < 10; ++round) {
        const Slice candidate = random.slice(kCells, kCells);
        bool overlaps = false;
        for (const Slice& other : kept) overlaps = overlaps || area(intersect(candidate, other)) > 0;
        if (!overlaps) kept.push_back(candidate);
    }
    return kept;
}

void check_random_masks() {
    Random random(7);
    int num_fitted = 0;
    for (int round = 0; round < 400; ++round) {
        const std::vector<Slice> slices = random_mask(random);
        const TileShape shape{random.between(1, 40), random.between(1, 24)};
        const auto tile_rows = static_cast<int32_t>(shape.tile_rows);
        const Cuts cuts = fitted_cuts(slices, kCells, shape);
        CHECK(cuts == slow_cuts(slices, tile_rows, static_cast<int32_t>(shape.block_cols)));
        for (const bool is_transposed : {false, true}) {
            const TileWork plain = build_tile_work(slices, kCells, shape, is_transposed);
            const TileWork work = build_fitted_work(slices, kCells, shape, is_transposed);
            const bool is_fitted = !work.cuts.empty();
            num_fitted += is_fitted;
            CHECK(is_fitted ? total_cost(work) < total_cost(plain) : work.costs == plain.costs && work.order == plain.order);
            CHECK(work.cuts != uniform(kCells, tile_rows));
            if (!is_fitted) continue;
            const std::vector<Slice> rows_first = is_transposed ? transposed(slices) : slices;
            CHECK(work.cuts == fitted_cuts(rows_first, kCells, shape));
            CHECK(work.costs == build_tile_work(slices, kCells, shape, is_transposed, work.cuts).costs);
        }
    }
    CHECK(num_fitted > 100);
}

void check_known_masks() {
    // Documents that end inside tiles: each has tiles of its own.
    const std::vector<Slice> documents = causal_documents({200, 200, 200, 200});
    const Cuts cuts{0, 128, 200, 328, 400, 528, 600, 728, 800};
    CHECK(fitted_cuts(documents, 800, {128, 128}) == cuts);
    CHECK(build_fitted_work(documents, 800, {128, 128}, false).cuts == cuts);
    CHECK(build_fitted_work(documents, 800, {128, 128}, true).cuts == cuts);
    // Not where tiles of two documents have as many blocks: columns 0 to 384 of rows 256 to 384.
    CHECK(fitted_cuts(causal_documents({300, 84}), 384, {128, 128}) == uniform(384, 128));
    CHECK(fitted_cuts(causal_documents({128, 128, 44}), 300, {128, 128}) == uniform(300, 128));
    CHECK(fitted_cuts(causal_documents({600}), 600, {128, 128}) == uniform(600, 128));
    // A border just before the end of a window is no reason for one tile more where the window ends at a border, too.
    CHECK(fitted_cuts(causal_documents(std::vector<int32_t>(150, 2)), 300, {128, 128}) == uniform(300, 128));
    CHECK(fitted_cuts({}, 0, {128, 128}) == Cuts({0}));
    CHECK(fitted_cuts({}, 300, {128, 128}) == uniform(300, 128));
    CHECK(fitted_cuts(causal_documents({1}), 1, {128, 128}) == Cuts({0, 1}));
    CHECK(fitted_cuts(causal_documents({1, 1, 1}), 3, {1, 1}) == Cuts({0, 1, 2, 3}));
    CHECK(build_fitted_work(causal_documents({128, 128, 44}), 300, {128, 128}, false).cuts.empty());
}

void check_large_sizes() {
    const auto top = static_cast<int32_t>(kMaxTokens);
    const std::vector<Slice> slices{{0, top - 7, 0, top, -kUnbounded, 0}, {top - 7, top, 0, top}};
    const Cuts cuts = fitted_cuts(slices, top, {int64_t{1} << 29, 1});
    CHECK(cuts.front() == 0 && cuts.back() == top && std::is_sorted(cuts.begin(), cuts.end()));
    CHECK(fitted_cuts(slices, top, {kMaxTokens, kMaxTokens}).back() == top);
}

}  // namespace

int main() {
    check_random_masks();
    check_known_masks();
    check_large_sizes();
    return report("fitted_tiles");
}
