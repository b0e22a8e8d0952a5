// The device planner's code on the host, by teams of one thread and of several, against the host planner: segments, pieces, costs.
#include <algorithm>
#include <barrier>
#include <memory>
#include <thread>

#include "attention/device_slices.h"
#include "attention/tile_segments.h"
#include "check.h"
#include "solver/tile_work.h"

using namespace magi;
using namespace magi::test;

namespace {

struct SoloTeam {
    int64_t partial = 0;
    int32_t rank() const { return 0; }
    int32_t size() const { return 1; }
    int32_t lane() const { return 0; }
    int32_t width() const { return 1; }
    uint32_t ballot(bool vote) const { return vote ? 1 : 0; }
    int64_t* partials() { return &partial; }
    void sync() const {}
};

// Real threads: what one writes and another reads without a sync() in between is a race that -fsanitize=thread reports.
constexpr int kThreads = 6, kWidth = 2;

struct Shared {
    std::barrier<> all{kThreads};
    std::vector<std::unique_ptr<std::barrier<>>> group;
    int64_t partials[kThreads] = {};
    bool votes[kThreads] = {};
    Shared() {
        for (int idx = 0; idx < kThreads / kWidth; ++idx) group.push_back(std::make_unique<std::barrier<>>(kWidth));
    }
};

struct ThreadTeam {
    Shared& shared;
    int32_t own_rank;
    int32_t rank() const { return own_rank; }
    int32_t size() const { return kThreads; }
    int32_t lane() const { return own_rank % kWidth; }
    int32_t width() const { return kWidth; }
    uint32_t ballot(bool vote) {
        std::barrier<>& group = *shared.group[static_cast<size_t>(own_rank / kWidth)];
        shared.votes[own_rank] = vote;
        group.arrive_and_wait();
        uint32_t bits = 0;
        for (int lane = 0; lane < kWidth; ++lane) bits |= shared.votes[own_rank / kWidth * kWidth + lane] ? 1u << lane : 0;
        group.arrive_and_wait();
        return bits;
    }
    int64_t* partials() { return shared.partials; }
    void sync() { shared.all.arrive_and_wait(); }
};

struct TileResult {
    std::vector<WorkSegment> segments;
    std::vector<WorkPiece> pieces;
    int32_t cost = 0;
};

constexpr int32_t kPieceBase = 3;

template <class Team>
void make_tile(Team& team, std::vector<int32_t>& memory, const std::vector<Slice>& pieces, Columns rows, int32_t block_cols,
               TileResult& result) {
    TileScratch scratch(memory.data(), static_cast<int64_t>(memory.size()) / TileScratch::kIntsPerPiece);
    if (team.rank() == 0) std::copy(pieces.begin(), pieces.end(), scratch.pieces);
    team.sync();
    TileSegments<Team> tile(team, scratch, static_cast<int32_t>(pieces.size()), rows.begin, rows.end - rows.begin, block_cols);
    const TileTotals totals = tile.measure();
    const auto num_pieces = static_cast<int64_t>(pieces.size());
    if (team.rank() == 0) {
        CHECK(totals.num_edges <= (kMaxSegmentsPerPiece - 1) * num_pieces && totals.num_interior <= num_pieces);
        CHECK(totals.num_pieces <= totals.num_edges * num_pieces);
        result.segments.assign(static_cast<size_t>(totals.num_edges + totals.num_interior), WorkSegment{});
        result.pieces.assign(static_cast<size_t>(totals.num_pieces) + kPieceBase, WorkPiece{});
        result.cost = tile_cost(totals.num_interior_blocks, totals.num_edge_blocks);
    }
    team.sync();
    tile.write(result.segments.data(), result.pieces.data(), kPieceBase);
}

bool same_piece(const WorkPiece& a, const Slice& b) {
    return a.row_begin == b.q_start && a.row_end == b.q_end && a.col_begin == b.k_start && a.col_end == b.k_end && a.lo == b.lo &&
           a.hi == b.hi;
}

void check_tile(const TileResult& found, const TileWork& host, size_t tile) {
    const auto begin = static_cast<size_t>(host.segment_offsets[tile]), end = static_cast<size_t>(host.segment_offsets[tile + 1]);
    CHECK_EQUAL(found.segments.size(), end - begin);
    CHECK_EQUAL(found.cost, host.costs[tile]);
    if (found.segments.size() != end - begin) return;
    int32_t next = kPieceBase;
    for (size_t idx = begin; idx < end; ++idx) {
        const TileSegment& expected = host.segments[idx];
        const WorkSegment& segment = found.segments[idx - begin];
        CHECK_EQUAL(segment.col_begin, expected.col_begin);
        CHECK_EQUAL(segment.col_end, expected.col_end);
        CHECK_EQUAL(segment.piece_end - segment.piece_begin, expected.piece_end - expected.piece_begin);
        if (segment.piece_begin == segment.piece_end) continue;
        CHECK_EQUAL(segment.piece_begin, next);
        next = segment.piece_end;
        for (int32_t at = 0; at < segment.piece_end - segment.piece_begin; ++at)
            CHECK(same_piece(found.pieces[static_cast<size_t>(segment.piece_begin + at)],
                             host.pieces[static_cast<size_t>(expected.piece_begin + at)]));
    }
    CHECK_EQUAL(static_cast<size_t>(next), found.pieces.size());
}

// Every tile as the kernels make it, with its pieces in an order of no meaning.
void check_mask(const std::vector<Slice>& slices, int32_t total_q, int32_t total_k, TileShape shape, bool is_transposed, bool has_threads) {
    DeviceWorkArgs args{};
    args.total_q = total_q;
    args.total_k = total_k;
    args.is_transposed = is_transposed;
    args.slices = reinterpret_cast<const int32_t*>(slices.data());
    args.num_slices = static_cast<int64_t>(slices.size());
    const int32_t num_rows = is_transposed ? total_k : total_q;
    const TileWork host = build_tile_work(slices, num_rows, shape, is_transposed);
    std::vector<int32_t> memory;
    for (size_t tile = 0; tile < host.order.size(); ++tile) {
        const auto first_row = static_cast<int32_t>(static_cast<int64_t>(tile) * shape.tile_rows);
        const Columns rows{first_row, static_cast<int32_t>(std::min<int64_t>(first_row + shape.tile_rows, num_rows))};
        std::vector<Slice> pieces;
        for (int64_t idx = args.num_slices - 1; idx >= 0; --idx) {
            int32_t status = 0;
            Slice piece = read_slice(args, idx, status);
            CHECK_EQUAL(status, 0);
            piece.q_start = std::max(piece.q_start, rows.begin);
            piece.q_end = std::min(piece.q_end, rows.end);
            if (piece.q_start >= piece.q_end) continue;
            CHECK(tighten(piece));
            pieces.push_back(piece);
        }
        std::rotate(pieces.begin(), pieces.begin() + static_cast<int64_t>(pieces.size()) / 3, pieces.end());
        memory.assign(pieces.size() * TileScratch::kIntsPerPiece, -1);
        TileResult result;
        const auto block_cols = static_cast<int32_t>(shape.block_cols);
        if (has_threads) {
            Shared shared;
            std::vector<std::thread> threads;
            for (int rank = 0; rank < kThreads; ++rank)
                threads.emplace_back([&, rank] {
                    ThreadTeam team{shared, rank};
                    make_tile(team, memory, pieces, rows, block_cols, result);
                });
            for (std::thread& thread : threads) thread.join();
        } else {
            SoloTeam team;
            make_tile(team, memory, pieces, rows, block_cols, result);
        }
        check_tile(result, host, tile);
    }
}

// Slices without a doubly covered cell. A cell is a tile's worth of tokens, so that blocks can be interior.
std::vector<Slice> random_mask(Random& random, int32_t total_q, int32_t total_k, int num_tries) {
    std::vector<Slice> kept;
    for (int round = 0; round < num_tries; ++round) {
        Slice candidate = random.slice(total_q, total_k);
        if (random.between(0, 3) == 0) candidate.lo = -kUnbounded, candidate.hi = kUnbounded;
        if (random.between(0, 3) == 0) candidate.q_start = 0, candidate.q_end = total_q;
        bool overlaps = false;
        for (const Slice& other : kept) overlaps = overlaps || area(intersect(candidate, other)) > 0;
        if (!overlaps) kept.push_back(candidate);
    }
    return kept;
}

void check_random_masks() {
    Random random(5);
    for (int round = 0; round < 3000; ++round) {
        const auto total_q = static_cast<int32_t>(random.between(1, 120)), total_k = static_cast<int32_t>(random.between(1, 200));
        const std::vector<Slice> slices = random_mask(random, total_q, total_k, static_cast<int>(random.between(0, 40)));
        const TileShape shape{random.between(1, 64), random.between(1, 40)};
        check_mask(slices, total_q, total_k, shape, random.between(0, 1) == 1, round % 100 == 0);
    }
}

void check_known_masks() {
    std::vector<int32_t> lengths;
    Random random(9);
    for (int idx = 0; idx < 400; ++idx) lengths.push_back(static_cast<int32_t>(random.between(0, 4)));
    for (const bool is_transposed : {false, true}) {
        check_mask(causal_documents({4096}), 4096, 4096, {128, 128}, is_transposed, false);
        check_mask({{0, 4096, 0, 4096, -1023, 0}}, 4096, 4096, {128, 64}, is_transposed, false);
        check_mask(causal_documents(lengths), 1600, 1600, {128, 128}, is_transposed, true);
        check_mask({}, 300, 300, {128, 128}, is_transposed, false);
        std::vector<Slice> frames;
        for (int32_t frame = 0; frame < 5; ++frame) frames.push_back({frame * 300, frame * 300 + 300, 0, frame * 300 + 300});
        check_mask(frames, 1500, 1500, {128, 128}, is_transposed, true);
        // One key per slice: a run each, in an order that is not that of the columns.
        std::vector<Slice> scattered;
        for (int32_t idx = 0; idx < 700; ++idx) scattered.push_back({0, 128, idx * 37 % 1400, idx * 37 % 1400 + 1});
        check_mask(scattered, 128, 1400, {128, 128}, is_transposed, !is_transposed);
        const auto top = static_cast<int32_t>(kMaxTokens);
        check_mask({{top - 9, top, 0, top, -kUnbounded, 0}}, top, top, {int64_t{1} << 29, kMaxTokens}, is_transposed, false);
    }
}

void check_reading() {
    DeviceWorkArgs args{};
    args.total_q = 100;
    args.total_k = 50;
    const std::vector<int64_t> q_ranges{10, 30, -5, 20, 90, 120, 40, 30, 0, 10, 0, 10, INT64_MIN, INT64_MAX};
    const std::vector<int64_t> k_ranges{0, 40, 0, 50, 0, 60, 0, 10, 0, 10, 20, 50, 0, 50};
    const std::vector<int64_t> types{1, 1, 1, 0, 4, 3, 0};
    args.q_ranges = q_ranges.data();
    args.k_ranges = k_ranges.data();
    args.types = types.data();
    args.range_bytes = args.type_bytes = 8;
    const auto read = [&](int64_t idx, int32_t expected_status) {
        int32_t status = 0;
        const Slice slice = read_slice(args, idx, status);
        CHECK_EQUAL(status, expected_status);
        return slice;
    };
    CHECK(read(0, 0) == (Slice{10, 30, 0, 40, -kUnbounded, 10}));
    // Cut at the tensors, aligned as if it were not: query i of [-5, 20) sees keys up to i + 30.
    CHECK(read(1, kRangeOutside) == (Slice{0, 20, 0, 50, -kUnbounded, 30}));
    CHECK(read(2, kRangeOutside) == (Slice{90, 100, 0, 40, -kUnbounded, -60}));
    CHECK(read(3, kRangeOutside) == Slice{});
    CHECK(read(4, kUnknownType) == Slice{});
    CHECK(read(5, 0) == (Slice{0, 10, 20, 50, 20, 40}));
    CHECK(read(6, kRangeOutside) == (Slice{0, 100, 0, 50}));
    args.types = nullptr;
    CHECK(read(0, 0) == (Slice{10, 30, 0, 40}));
    args.is_transposed = 1;
    CHECK(read(0, 0) == (Slice{0, 40, 10, 30}));
    const std::vector<int32_t> narrow{10, 30};
    args.q_ranges = args.k_ranges = narrow.data();
    args.range_bytes = 4;
    CHECK(read(0, 0) == (Slice{10, 30, 10, 30}));
}

void check_plan() {
    DeviceWorkArgs args{};
    args.total_q = 1000;
    args.total_k = 77;
    args.tile_rows = 128;
    args.block_cols = 64;
    CHECK_EQUAL(plan_workspace(args).list.num_tiles, 8);
    CHECK_EQUAL(plan_workspace(args).capacity_segments, 0);
    for (const int64_t num_slices : {1, 12, 300, 10'000, 1 << 24}) {
        args.num_slices = num_slices;
        const WorkspacePlan plan = plan_workspace(args);
        CHECK(plan.capacity_segments >= std::min<int64_t>(4 * num_slices * 8, 1 << 20));
        CHECK(plan.capacity_pieces >= std::min<int64_t>(3 * num_slices * num_slices * 8, 1 << 20));
        CHECK_EQUAL(plan.capacity_pool > 0, num_slices > kSharedPieces);
        CHECK(plan.list.offset_segments % 4 == 0 && plan.offset_pool % 4 == 0 && plan.offset_pool_used % 4 == 0);
        CHECK(plan.list.offset_pieces - plan.list.offset_segments >= 4 * plan.capacity_segments);
        CHECK_EQUAL(plan.list.workspace_size - plan.offset_pool, plan.capacity_pool * TileScratch::kIntsPerPiece);
    }
    args.is_transposed = 1;
    CHECK_EQUAL(plan_workspace(args).list.num_rows, 77);
}

void check_sort() {
    Random random(3);
    for (int32_t n = 0; n < 200; ++n) {
        std::vector<int32_t> items, expected;
        for (int32_t i = 0; i < n; ++i) items.push_back(static_cast<int32_t>(random.between(0, n)));
        expected = items;
        std::sort(expected.begin(), expected.end());
        SoloTeam team;
        team_sort(team, items.data(), n);
        CHECK(items == expected);
    }
}

}  // namespace

int main() {
    check_sort();
    check_reading();
    check_plan();
    check_known_masks();
    check_random_masks();
    return report("device_work");
}
