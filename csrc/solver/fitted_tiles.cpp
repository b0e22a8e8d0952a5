// One sweep over slices by first row; at each window, the blocks of the slices that reach into it. Knows nothing of segments.
#include "solver/fitted_tiles.h"

#include <algorithm>

#include "base/arrays.h"
#include "base/tile_cost.h"

namespace magi {

namespace {

struct Rows {
    int32_t begin, end;
};

std::vector<Slice> tight_by_row(std::span<const Slice> slices, int64_t num_rows) {
    std::vector<Slice> tight;
    tight.reserve(slices.size());
    for (const Slice& slice : slices) {
        Slice inside = clip(slice, 0, static_cast<int32_t>(num_rows), slice.k_start, slice.k_end);
        if (tighten(inside)) tight.push_back(inside);
    }
    const auto is_earlier = [](const Slice& a, const Slice& b) { return a.q_start < b.q_start; };
    if (!std::is_sorted(tight.begin(), tight.end(), is_earlier)) std::stable_sort(tight.begin(), tight.end(), is_earlier);
    return tight;
}

std::vector<int32_t> borders_of(std::span<const Slice> tight) {
    std::vector<int32_t> borders;
    borders.reserve(2 * tight.size());
    for (const Slice& slice : tight) {
        borders.push_back(slice.q_start);
        borders.push_back(slice.q_end);
    }
    if (!std::is_sorted(borders.begin(), borders.end())) std::sort(borders.begin(), borders.end());
    borders.erase(std::unique(borders.begin(), borders.end()), borders.end());
    return borders;
}

// The slices that reach into a window which only moves down.
class Window {
public:
    Window(std::span<const Slice> tight, TileShape shape) : tight_(tight), shape_(shape) {}

    void move_to(Rows rows) {
        std::erase_if(active_, [&](const Slice& slice) { return slice.q_end <= rows.begin; });
        for (; next_ < tight_.size() && tight_[next_].q_start < rows.end; ++next_)
            if (tight_[next_].q_end > rows.begin) active_.push_back(tight_[next_]);
    }

    // Of rows inside the window as one tile. Which blocks are edges depends on more than columns; here all cost the same.
    int64_t cost(Rows rows) {
        columns_.clear();
        for (const Slice& slice : active_) {
            const int32_t first = std::max(slice.q_start, rows.begin), end = std::min(slice.q_end, rows.end);
            // Each row of a tight slice sees a column, so these ranges are not empty.
            if (first < end) columns_.push_back({std::max(slice.k_start, first + slice.lo), std::min(slice.k_end, end + slice.hi)});
        }
        const auto is_before = [](const Columns& a, const Columns& b) { return a.begin < b.begin; };
        if (!std::is_sorted(columns_.begin(), columns_.end(), is_before)) std::sort(columns_.begin(), columns_.end(), is_before);
        int64_t num_blocks = 0;
        for (size_t idx = 0; idx < columns_.size();) {
            Columns run = columns_[idx];
            for (++idx; idx < columns_.size() && columns_[idx].begin <= run.end; ++idx) run.end = std::max(run.end, columns_[idx].end);
            num_blocks += (run.end - run.begin - 1) / shape_.block_cols + 1;
        }
        return tile_cost(num_blocks, 0);
    }

private:
    std::span<const Slice> tight_;
    const TileShape shape_;
    size_t next_ = 0;
    std::vector<Slice> active_;
    std::vector<Columns> columns_;
};

// A cut costs at most one block more where the window ends inside a slice: the tiles that follow lie better. It costs no more where the
// window ends at a border by itself. Costs and rows are below 2^31, so products stay inside 63 bits.
bool is_better_cut(Window& window, Rows tile, int32_t cut, bool ends_at_border, TileShape shape, int64_t num_rows) {
    const Rows next{cut, static_cast<int32_t>(std::min(cut + shape.tile_rows, num_rows))};
    window.move_to({tile.begin, next.end});
    const int64_t whole = window.cost(tile), before = window.cost({tile.begin, cut}), after = window.cost(next);
    const int64_t next_rows = next.end - next.begin, slack = ends_at_border ? 0 : kInteriorBlockCost;
    return next_rows * before + (tile.end - cut) * after <= next_rows * (whole + slack);
}

bool is_uniform(std::span<const int32_t> cuts, int64_t tile_rows) {
    for (size_t tile = 0; tile + 1 < cuts.size(); ++tile)
        if (cuts[tile] != static_cast<int64_t>(tile) * tile_rows) return false;
    return true;
}

}  // namespace

std::vector<int32_t> fitted_cuts(std::span<const Slice> slices, int64_t num_rows, TileShape shape) {
    check_sizes(num_rows, shape);
    const std::vector<Slice> tight = tight_by_row(slices, num_rows);
    const std::vector<int32_t> borders = borders_of(tight);
    Window window(tight, shape);
    std::vector<int32_t> cuts{0};
    auto inside = borders.begin();  // the first border past the first row of the tile
    while (cuts.back() < num_rows) {
        Rows tile{cuts.back(), static_cast<int32_t>(std::min(cuts.back() + shape.tile_rows, num_rows))};
        inside = std::find_if(inside, borders.end(), [&](int32_t border) { return border > tile.begin; });
        const auto past = std::lower_bound(inside, borders.end(), tile.end);
        const bool ends_at_border = tile.end == num_rows || (past != borders.end() && *past == tile.end);
        if (inside != past && is_better_cut(window, tile, past[-1], ends_at_border, shape, num_rows)) tile.end = past[-1];
        cuts.push_back(tile.end);
    }
    return cuts;
}

TileWork build_fitted_work(std::span<const Slice> slices, int64_t num_rows, TileShape shape, bool is_transposed) {
    std::vector<Slice> mirrored;
    if (is_transposed) slices = mirrored = transposed(slices);
    const std::vector<int32_t> cuts = fitted_cuts(slices, num_rows, shape);
    if (!is_uniform(cuts, shape.tile_rows)) {
        try {
            TileWork fitted = build_tile_work(slices, num_rows, shape, false, cuts);
            if (total_cost(fitted) < uniform_cost(slices, num_rows, shape)) return fitted;
        } catch (const InputError&) {
            // More tiles have more pieces: a list that is too long is no reason to refuse slices which the other one has room for.
        }
    }
    return build_tile_work(slices, num_rows, shape, false);
}

}  // namespace magi
