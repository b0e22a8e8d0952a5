// The tile work list counts every visible cell once: block by block against the slices, on random masks and on known ones.
#include "solver/tile_work.h"

#include <algorithm>

#include "check.h"

#include "base/arrays.h"
#include "base/tile_cost.h"
#include "solver/tile_rows.h"

using namespace magi;
using namespace magi::test;

namespace {

constexpr int32_t kCells = 60;

// Random slices without a doubly covered cell.
std::vector<Slice> random_mask(Random& random) {
    std::vector<Slice> kept;
    for (int round = 0; round < 8; ++round) {
        const Slice candidate = random.slice(kCells, kCells);
        bool overlaps = false;
        for (const Slice& other : kept) overlaps = overlaps || area(intersect(candidate, other)) > 0;
        if (!overlaps) kept.push_back(candidate);
    }
    return kept;
}

int count_segment(const TileWork& work, const TileSegment& segment, int32_t row, int32_t col) {
    if (col < segment.col_begin || col >= segment.col_end) return 0;
    if (segment.piece_begin == segment.piece_end) return 1;
    int count = 0;
    for (int32_t idx = segment.piece_begin; idx < segment.piece_end; ++idx) count += sees(work.pieces[static_cast<size_t>(idx)], row, col);
    return count;
}

std::vector<int32_t> random_cuts(Random& random, int64_t tile_rows) {
    std::vector<int32_t> cuts{0};
    while (cuts.back() < kCells) cuts.push_back(std::min(kCells, static_cast<int32_t>(cuts.back() + random.between(1, tile_rows))));
    return cuts;
}

void check_cells(const std::vector<Slice>& slices, TileShape shape, bool is_transposed, const std::vector<int32_t>& cuts = {}) {
    const TileWork work = build_tile_work(slices, kCells, shape, is_transposed, cuts);
    const TileRows rows(kCells, shape.tile_rows, cuts);
    const auto num_tiles = static_cast<size_t>(rows.num_tiles());
    CHECK_EQUAL(num_tiles, cuts.empty() ? static_cast<size_t>((kCells + shape.tile_rows - 1) / shape.tile_rows) : cuts.size() - 1);
    CHECK(work.cuts == cuts);
    CHECK_EQUAL(work.order.size(), num_tiles);
    CHECK_EQUAL(work.segment_offsets.size(), num_tiles + 1);
    for (int32_t row = 0; row < kCells; ++row) {
        const auto tile = static_cast<size_t>(rows.tile_of(row));
        CHECK(rows.begin(static_cast<int64_t>(tile)) <= row && row < rows.end(static_cast<int64_t>(tile)));
        for (int32_t col = 0; col < kCells; ++col) {
            int expected = 0, found = 0;
            for (const Slice& slice : slices) expected += is_transposed ? sees(slice, col, row) : sees(slice, row, col);
            for (int32_t idx = work.segment_offsets[tile]; idx < work.segment_offsets[tile + 1]; ++idx)
                found += count_segment(work, work.segments[static_cast<size_t>(idx)], row, col);
            CHECK_EQUAL(found, expected);
        }
    }
    for (size_t idx = 1; idx < num_tiles; ++idx) {
        const int32_t before = work.order[idx - 1], after = work.order[idx];
        const int32_t cost_before = work.costs[static_cast<size_t>(before)], cost_after = work.costs[static_cast<size_t>(after)];
        CHECK(cost_before > cost_after || (cost_before == cost_after && before < after));
    }
}

void check_causal() {
    const TileWork work = build_tile_work(causal_documents({1024}), 1024, {128, 128}, false);
    CHECK_EQUAL(work.segments.size(), 15u);
    CHECK_EQUAL(work.pieces.size(), 8u);
    CHECK_EQUAL(work.costs[7], 7 * kInteriorBlockCost + kEdgeBlockCost + kTileCost);
    CHECK_EQUAL(work.order[0], 7);
    const PackedTileWork packed = pack(work);
    CHECK_EQUAL(packed.offset_segments % 4, 0);
    CHECK_EQUAL(packed.values.size(), static_cast<size_t>(packed.offset_pieces + 6 * 8));
    CHECK_EQUAL(packed.values[static_cast<size_t>(packed.offset_order)], 7);
    CHECK_EQUAL(packed.values[static_cast<size_t>(packed.offset_segment_offsets) + 8], 15);
    CHECK_EQUAL(packed.values[static_cast<size_t>(packed.offset_segments)], 0);
    CHECK_EQUAL(packed.values[static_cast<size_t>(packed.offset_pieces) + 1], 128);
}

void check_packed_cuts() {
    const std::vector<int32_t> cuts{0, 100, 200, 300, 301};
    const TileWork work = build_tile_work(causal_documents({200, 101}), 301, {128, 64}, false, cuts);
    // Of documents that begin with a tile: whole blocks that its first row sees, then edges.
    CHECK_EQUAL(work.costs[1], kInteriorBlockCost + 3 * kEdgeBlockCost + kTileCost);
    CHECK_EQUAL(work.costs[3], kInteriorBlockCost + kEdgeBlockCost + kTileCost);
    const PackedTileWork packed = pack(work);
    // Tiles 0 and 1 are a document, 2 and 3 another one, which begins in tile 1's rows or after them.
    CHECK_EQUAL(work.near_order.empty(), packed.offset_near_order == PackedTileWork::kNone);
    CHECK_EQUAL(packed.offset_cuts, packed.offset_segment_offsets + 5 + static_cast<int64_t>(work.near_order.size()));
    CHECK(packed.offset_segments % 4 == 0 && packed.offset_segments >= packed.offset_cuts + 5);
    CHECK(std::equal(cuts.begin(), cuts.end(), packed.values.begin() + packed.offset_cuts));
    CHECK_EQUAL(packed.values[static_cast<size_t>(packed.offset_segments) + 1], work.segments[0].col_end);
    CHECK_EQUAL(pack(build_tile_work({}, 301, {128, 64}, false)).offset_cuts, PackedTileWork::kNone);
}

void check_near_order() {
    const TileWork work = build_tile_work(causal_documents({256, 512, 128}), 896, {128, 64}, true);
    CHECK(work.order == std::vector<int32_t>({2, 3, 0, 4, 1, 5, 6}));
    CHECK(work.near_order == std::vector<int32_t>({2, 3, 4, 5, 0, 1, 6}));
    const PackedTileWork packed = pack(work);
    CHECK(std::equal(work.near_order.begin(), work.near_order.end(), packed.values.begin() + packed.offset_near_order));
    CHECK(build_tile_work(causal_documents({1024}), 1024, {128, 64}, true).near_order.empty());
}

void check_costs() {
    CHECK_EQUAL(tile_cost(0, 0), 0);
    CHECK_EQUAL(tile_cost(2, 3), 2 * 1024 + 3 * 1300 + 600);
    CHECK_EQUAL(tile_cost(int64_t{1} << 29, 0), kMaxTileCost);
}

void check_empty() {
    const TileWork nothing = build_tile_work({}, 0, {128, 128}, false);
    CHECK(nothing.order.empty() && nothing.segment_offsets.size() == 1 && pack(nothing).values.size() == 8);
    const TileWork rows_only = build_tile_work({}, 300, {128, 128}, true);
    CHECK(rows_only.order == std::vector<int32_t>({0, 1, 2}) && rows_only.segments.empty());
}

template <class Call>
void check_refused(Call call) {
    bool is_refused = false;
    try {
        call();
    } catch (const InputError&) {
        is_refused = true;
    }
    CHECK(is_refused);
}

}  // namespace

int main() {
    Random random(11);
    for (int round = 0; round < 150; ++round) {
        const std::vector<Slice> slices = random_mask(random);
        const TileShape shape{random.between(1, 40), random.between(1, 24)};
        check_cells(slices, shape, false);
        check_cells(slices, shape, true);
        check_cells(slices, shape, round % 2 == 0, random_cuts(random, shape.tile_rows));
        CHECK_EQUAL(uniform_cost(slices, kCells, shape), total_cost(build_tile_work(slices, kCells, shape, false)));
    }
    check_causal();
    check_packed_cuts();
    check_near_order();
    check_costs();
    check_empty();
    check_refused([] { build_tile_work({}, -1, {128, 128}, false); });
    check_refused([] { build_tile_work({}, 8, {0, 128}, false); });
    check_refused([] { build_tile_work({}, 8, {128, 0}, false); });
    for (const std::vector<int32_t>& wrong :
         std::vector<std::vector<int32_t>>{{0}, {0, 7}, {1, 8}, {0, 5, 8}, {0, 4, 4, 8}, {0, 4, 3, 7, 8}})
        check_refused([&] { build_tile_work({}, 8, {4, 128}, false, wrong); });
    return report("tile_work");
}
