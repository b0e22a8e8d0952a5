// Per tile: runs of columns, the columns every row sees, then blocks joined to segments. Sweeps over sorted pieces;
// knows nothing of what a kernel does with a block.
#include "solver/tile_work.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "base/arrays.h"
#include "base/tile_cost.h"
#include "solver/tile_order.h"
#include "solver/tile_rows.h"
#include "solver/work_list.h"

namespace magi {

namespace {

constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
constexpr int64_t kHeader = 4;

void check_size(const char* name, int64_t value, int64_t low) {
    if (value < low || value > kMaxTokens)
        throw InputError(std::string(name) + "=" + std::to_string(value) + " must be from " + std::to_string(low) + " to " +
                         std::to_string(kMaxTokens));
}

// Blocks [begin, end) of a run.
struct Blocks {
    int32_t begin, end;
};

// Builds the segments of one tile after the other; scratch memory is kept between tiles.
class TileBuilder {
public:
    TileBuilder(TileWork& work, int64_t block_cols) : work_(work), block_cols_(static_cast<int32_t>(block_cols)) {}

    // pieces: tight, by ascending k_start; num_rows: rows that the tile has.
    void add_tile(std::span<const Slice> pieces, int32_t num_rows) {
        interior_segments_.clear();
        const int32_t cost = visit_runs(pieces, num_rows, [&](std::span<const Slice> run) { add_run(run); });
        work_.segments.insert(work_.segments.end(), interior_segments_.begin(), interior_segments_.end());
        if (static_cast<int64_t>(work_.segments.size()) > kLargest / 4 || static_cast<int64_t>(work_.pieces.size()) > kLargest / 6)
            throw InputError("slices: the work list has more than 2^31 numbers; take larger tiles or fewer slices");
        work_.segment_offsets.push_back(static_cast<int32_t>(work_.segments.size()));
        work_.costs.push_back(cost);
    }

    // The same tile, only measured.
    int32_t cost_of(std::span<const Slice> pieces, int32_t num_rows) {
        return visit_runs(pieces, num_rows, [](std::span<const Slice>) {});
    }

private:
    // Calls add(pieces of a run) with the run and its interior blocks in the members; returns what the tile costs.
    template <class Add>
    int32_t visit_runs(std::span<const Slice> pieces, int32_t num_rows, Add add) {
        int64_t num_interior = 0, num_blocks = 0;
        for (size_t begin = 0; begin < pieces.size();) {
            run_begin_ = pieces[begin].k_start;
            run_end_ = pieces[begin].k_end;
            size_t end = begin + 1;
            for (; end < pieces.size() && pieces[end].k_start <= run_end_; ++end) run_end_ = std::max(run_end_, pieces[end].k_end);
            const std::span<const Slice> run = pieces.subspan(begin, end - begin);
            find_interior(run, num_rows);
            for (const Blocks& inside : interior_) num_interior += inside.end - inside.begin;
            num_blocks += num_run_blocks();
            add(run);
            begin = end;
        }
        return tile_cost(num_interior, num_blocks - num_interior);
    }

    void add_run(std::span<const Slice> pieces) {
        find_cuts(pieces);
        next_piece_ = next_cut_ = 0;
        active_.clear();
        int32_t block = 0;
        for (const Blocks& inside : interior_) {
            add_edges(pieces, {block, inside.begin});
            interior_segments_.push_back({column(inside.begin), column(inside.end), 0, 0});
            block = inside.end;
        }
        add_edges(pieces, {block, num_run_blocks()});
    }

    // Blocks whose columns are all seen by every row. No cell is covered twice, so rows can be summed.
    void find_interior(std::span<const Slice> pieces, int32_t num_rows) {
        interior_.clear();
        events_.clear();
        for (const Slice& piece : pieces) {
            const Columns seen = columns_all_rows_see(piece);
            if (seen.begin >= seen.end) continue;
            events_.push_back({seen.begin, piece.q_end - piece.q_start});
            events_.push_back({seen.end, piece.q_start - piece.q_end});
        }
        std::sort(events_.begin(), events_.end());
        int64_t rows = 0;
        int32_t begin = 0;
        for (size_t idx = 0; idx < events_.size(); ++idx) {
            const bool was_full = rows >= num_rows;
            const int32_t here = events_[idx].first;
            rows += events_[idx].second;
            while (idx + 1 < events_.size() && events_[idx + 1].first == here) rows += events_[++idx].second;
            const bool is_full = rows >= num_rows;
            if (!was_full && is_full) begin = here;
            if (!was_full || is_full) continue;
            const Blocks inside{(begin - run_begin_ + (block_cols_ - 1)) / block_cols_, (here - run_begin_) / block_cols_};
            if (inside.begin < inside.end) interior_.push_back(inside);
        }
    }

    int32_t num_run_blocks() const { return (run_end_ - run_begin_ - 1) / block_cols_ + 1; }
    int32_t first_block(const Slice& piece) const { return (piece.k_start - run_begin_) / block_cols_; }
    int32_t end_block(const Slice& piece) const { return (piece.k_end - 1 - run_begin_) / block_cols_ + 1; }
    int32_t column(int32_t block) const { return run_begin_ + block * block_cols_; }

    // Where the set of pieces that touch a block changes.
    void find_cuts(std::span<const Slice> pieces) {
        cuts_.clear();
        for (const Slice& piece : pieces) {
            cuts_.push_back(first_block(piece));
            cuts_.push_back(end_block(piece));
        }
        std::sort(cuts_.begin(), cuts_.end());
        cuts_.erase(std::unique(cuts_.begin(), cuts_.end()), cuts_.end());
    }

    void add_edges(std::span<const Slice> pieces, Blocks blocks) {
        while (blocks.begin < blocks.end) {
            while (cuts_[next_cut_] <= blocks.begin) ++next_cut_;  // the last cut is the end of the run
            const int32_t end = std::min(cuts_[next_cut_], blocks.end);
            add_edge_segment(pieces, {blocks.begin, end});
            blocks.begin = end;
        }
    }

    void add_edge_segment(std::span<const Slice> pieces, Blocks blocks) {
        std::erase_if(active_, [&](size_t idx) { return end_block(pieces[idx]) <= blocks.begin; });
        for (; next_piece_ < pieces.size() && first_block(pieces[next_piece_]) < blocks.end; ++next_piece_)
            if (end_block(pieces[next_piece_]) > blocks.begin) active_.push_back(next_piece_);
        const auto piece_begin = static_cast<int32_t>(work_.pieces.size());
        for (const size_t idx : active_) work_.pieces.push_back(pieces[idx]);
        const int64_t col_end = int64_t{run_begin_} + int64_t{blocks.end} * block_cols_;  // ragged at the end of the run
        work_.segments.push_back({column(blocks.begin), static_cast<int32_t>(std::min<int64_t>(col_end, run_end_)), piece_begin,
                                  static_cast<int32_t>(work_.pieces.size())});
    }

    TileWork& work_;
    const int32_t block_cols_;
    int32_t run_begin_ = 0, run_end_ = 0;
    std::vector<TileSegment> interior_segments_;
    std::vector<Blocks> interior_;
    std::vector<std::pair<int32_t, int32_t>> events_;  // column, rows that begin or end to see it
    std::vector<int32_t> cuts_;
    std::vector<size_t> active_;
    size_t next_piece_ = 0, next_cut_ = 0;
};

}  // namespace

void check_sizes(int64_t num_rows, TileShape shape) {
    check_size("num_rows", num_rows, 0);
    check_size("tile_rows", shape.tile_rows, 1);
    check_size("block_cols", shape.block_cols, 1);
}

TileWork build_tile_work(std::span<const Slice> slices, int64_t num_rows, TileShape shape, bool is_transposed,
                         std::span<const int32_t> cuts) {
    check_sizes(num_rows, shape);
    std::vector<Slice> mirrored;
    if (is_transposed) slices = mirrored = transposed(slices);
    const TileRows rows(num_rows, shape.tile_rows, cuts);
    const WorkList list = build_work_list(slices, rows);
    const auto num_tiles = static_cast<size_t>(rows.num_tiles());
    TileWork work;
    work.cuts.assign(cuts.begin(), cuts.end());
    work.segment_offsets.reserve(num_tiles + 1);
    work.segment_offsets.push_back(0);
    work.costs.reserve(num_tiles);
    TileBuilder builder(work, shape.block_cols);
    for (int64_t tile = 0; tile < rows.num_tiles(); ++tile) builder.add_tile(list.pieces_of(tile), rows.end(tile) - rows.begin(tile));
    work.order = order_by_cost(work.costs);
    work.near_order = order_by_cluster(work);
    if (work.near_order == work.order) work.near_order.clear();
    return work;
}

std::vector<Slice> transposed(std::span<const Slice> slices) {
    std::vector<Slice> mirrored;
    mirrored.reserve(slices.size());
    for (const Slice& slice : slices) mirrored.push_back(transpose(slice));
    return mirrored;
}

int64_t uniform_cost(std::span<const Slice> slices, int64_t num_rows, TileShape shape) {
    check_sizes(num_rows, shape);
    const TileRows rows(num_rows, shape.tile_rows);
    const WorkList list = build_work_list(slices, rows);
    TileWork unused;
    TileBuilder builder(unused, shape.block_cols);
    int64_t sum = 0;
    for (int64_t tile = 0; tile < rows.num_tiles(); ++tile) sum += builder.cost_of(list.pieces_of(tile), rows.end(tile) - rows.begin(tile));
    return sum;
}

int64_t total_cost(const TileWork& work) { return std::accumulate(work.costs.begin(), work.costs.end(), int64_t{0}); }

PackedTileWork pack(const TileWork& work) {
    const auto num_tiles = static_cast<int64_t>(work.order.size());
    PackedTileWork packed;
    packed.offset_order = kHeader;
    packed.offset_segment_offsets = packed.offset_order + num_tiles;
    int64_t end = packed.offset_segment_offsets + num_tiles + 1;
    if (!work.near_order.empty()) {
        packed.offset_near_order = end;
        end += num_tiles;
    }
    if (!work.cuts.empty()) {
        packed.offset_cuts = end;
        end += num_tiles + 1;
    }
    packed.offset_segments = (end + 3) / 4 * 4;
    packed.offset_pieces = packed.offset_segments + 4 * static_cast<int64_t>(work.segments.size());
    const int64_t size = packed.offset_pieces + 6 * static_cast<int64_t>(work.pieces.size());
    if (size > kLargest)
        throw InputError("slices: the work list has " + std::to_string(size) +
                         " numbers, more than 2^31 - 1; take larger tiles or fewer slices");
    packed.values.assign(static_cast<size_t>(size), 0);
    packed.values[1] = static_cast<int32_t>(work.segments.size());
    packed.values[2] = static_cast<int32_t>(work.pieces.size());
    const auto put = [&](int64_t offset, const auto& records) {
        if (!records.empty()) std::memcpy(packed.values.data() + offset, records.data(), records.size() * sizeof(records[0]));
    };
    put(packed.offset_order, work.order);
    put(packed.offset_segment_offsets, work.segment_offsets);
    put(packed.offset_near_order, work.near_order);
    put(packed.offset_cuts, work.cuts);
    put(packed.offset_segments, work.segments);
    put(packed.offset_pieces, work.pieces);
    return packed;
}

}  // namespace magi
