// Where to cut; knows nothing of transfers.
//
// A cut is a token, so one comparison tells every owner in which step a receiver wants a row. Parts are contiguous in token
// order; equal parts may be received in any order (step_order.h), greedy ones ascend.
#include "solver/steps.h"

#include <algorithm>
#include <string>

#include "base/arrays.h"
#include "solver/step_order.h"

namespace magi {

namespace {

constexpr int64_t kRowAlign = 128;      // kernels read keys in tiles of this many rows
constexpr int64_t kSnapShare = 16;      // a cut moves to the edge of a run when that is closer than a 16th of a step
constexpr int64_t kMaxGreedyCuts = 96;  // places where a greedy cut may lie

// A good place near row `row` of the set: the edge of a run, else a multiple of the kernel's tile, when steps are large enough.
int32_t place_cut(const RowIndex& remote, int64_t row, int64_t rows_per_step) {
    const int32_t token = remote.token_at(static_cast<int32_t>(row));
    const size_t idx = remote.run_after(token);
    const int64_t to_start = row - remote.first_row(idx);
    const int64_t to_end = int64_t{remote.first_row(idx + 1)} - row;
    if (std::min(to_start, to_end) * kSnapShare <= rows_per_step) {
        if (to_start <= to_end) return remote.runs()[idx].start;
        return idx + 1 < remote.runs().size() ? remote.runs()[idx + 1].start : remote.runs()[idx].end;
    }
    if (rows_per_step < 4 * kRowAlign) return token;
    return remote.token_at(static_cast<int32_t>(row / kRowAlign * kRowAlign));
}

// Cuts in `parts` about equal parts of at least min_rows rows (parts * min_rows <= rows); ascending.
std::vector<int32_t> equal_cuts(const RowIndex& remote, int64_t parts, int64_t min_rows) {
    const int64_t rows = remote.num_rows();
    if (rows == 0) return {};
    std::vector<int32_t> cuts{remote.runs().front().start};
    for (int64_t part = 1; part < parts; ++part) {
        const int64_t low = remote.rows_before(cuts.back()) + min_rows, high = rows - min_rows * (parts - part);
        const int64_t row = rows * part / parts;
        int32_t cut = place_cut(remote, row, rows / parts);
        const int64_t cut_row = remote.rows_before(cut);
        if (cut_row < low || cut_row > high) cut = remote.token_at(static_cast<int32_t>(std::clamp(row, low, high)));
        cuts.push_back(cut);
    }
    cuts.push_back(remote.runs().back().end);
    return cuts;
}

int64_t parts_for(int64_t rows, int64_t wanted, int64_t min_rows) { return rows < min_rows ? 1 : std::min(rows / min_rows, wanted); }

// Work of one group in the windows of its fine cuts, averaged over its ranks.
struct GroupWork {
    double local_pairs = 0;
    std::vector<double> pairs;  // per fine window
};

// Joins fine windows, in token order, to steps that the compute of the step before hides.
std::vector<int32_t> greedy_cuts(const RowIndex& remote, const std::vector<int32_t>& fine, const GroupWork& work, const StepRule& rule,
                                 int64_t max_parts) {
    if (fine.empty()) return {};
    std::vector<int32_t> cuts{fine.front()};
    double budget_fs = work.local_pairs * static_cast<double>(rule.pair_cost_fs) - static_cast<double>(rule.start_cost_fs);
    double pairs = 0;
    int64_t first_row = 0;
    for (size_t window = 0; window + 1 < fine.size(); ++window) {
        const int64_t start_row = remote.rows_before(fine[window]), end_row = remote.rows_before(fine[window + 1]);
        const bool is_hidden = static_cast<double>(end_row - first_row) * static_cast<double>(rule.row_cost_fs) <= budget_fs;
        const bool is_large_enough = start_row - first_row >= rule.min_rows && remote.num_rows() - start_row >= rule.min_rows;
        if (!is_hidden && is_large_enough && static_cast<int64_t>(cuts.size()) < max_parts) {
            cuts.push_back(fine[window]);
            budget_fs = pairs * static_cast<double>(rule.pair_cost_fs) - static_cast<double>(rule.start_cost_fs);
            pairs = 0;
            first_row = start_row;
        }
        pairs += work.pairs[window];
    }
    cuts.push_back(fine.back());
    return cuts;
}

// Remote keys of each group of ranks that cut alike.
std::vector<RowIndex> group_remotes(const Needs& needs, size_t group_size) {
    if (group_size == 1) return needs.remote;
    std::vector<RowIndex> groups;
    for (size_t first = 0; first < needs.remote.size(); first += group_size) {
        Intervals joined;
        for (size_t rank = first; rank < first + group_size; ++rank) {
            const Intervals& runs = needs.remote[rank].runs();
            joined.insert(joined.end(), runs.begin(), runs.end());
        }
        normalize(joined);
        groups.emplace_back(std::move(joined));
    }
    return groups;
}

// Fine cuts of every group and the work between them.
struct FineWork {
    std::vector<std::vector<int32_t>> cuts;
    std::vector<GroupWork> work;
};

FineWork measure_fine(std::span<const Slice> slices, const Ownership& queries, const Needs& needs, const std::vector<RowIndex>& groups,
                      int64_t min_rows) {
    FineWork fine;
    const size_t group_size = needs.remote.size() / groups.size();
    const int64_t fine_rows = std::max<int64_t>(1, min_rows / 4);
    for (const RowIndex& remote : groups)
        fine.cuts.push_back(equal_cuts(remote, parts_for(remote.num_rows(), kMaxGreedyCuts, fine_rows), 1));
    std::vector<std::vector<int32_t>> rank_cuts;
    for (size_t rank = 0; rank < needs.remote.size(); ++rank) rank_cuts.push_back(fine.cuts[rank / group_size]);
    const auto areas = remote_areas(slices, queries, needs, rank_cuts);
    for (size_t group = 0; group < groups.size(); ++group) {
        GroupWork work;
        work.pairs.assign(fine.cuts[group].empty() ? 0 : fine.cuts[group].size() - 1, 0.0);
        for (size_t rank = group * group_size; rank < (group + 1) * group_size; ++rank) {
            const double share = 1.0 / static_cast<double>(group_size);
            work.local_pairs += static_cast<double>(needs.local_areas[rank]) * share;
            for (size_t window = 0; window < work.pairs.size(); ++window)
                work.pairs[window] += static_cast<double>(areas[rank][window]) * share;
        }
        fine.work.push_back(std::move(work));
    }
    return fine;
}

}  // namespace

StepSplit::StepSplit(std::vector<std::vector<int32_t>> cuts, std::vector<int32_t> first_parts, int32_t cp_size)
    : cuts_(std::move(cuts)), first_parts_(std::move(first_parts)), group_size_(cp_size / static_cast<int32_t>(cuts_.size())) {
    for (const auto& cut : cuts_) degree_ = std::max(degree_, static_cast<int32_t>(cut.size()) - 1);
}

Interval StepSplit::window(int32_t rank, int32_t step) const {
    const size_t group = group_of(rank);
    const std::vector<int32_t>& cuts = cuts_[group];
    const auto parts = static_cast<int32_t>(cuts.size()) - 1;
    if (step >= parts) return {};
    const auto part = static_cast<size_t>(first_parts_.empty() ? step : part_of_step(first_parts_[group], parts, step));
    return {cuts[part], cuts[part + 1]};
}

std::vector<StepSplit> split_steps(std::span<const Slice> slices, const Ownership& queries, const Ownership& keys, const Needs& needs,
                                   const StepRule& rule, std::span<const int64_t> degrees) {
    const auto cp_size = static_cast<int64_t>(needs.remote.size());
    if (rule.num_nodes < 1 || cp_size % rule.num_nodes != 0)
        throw InputError("num_nodes=" + std::to_string(rule.num_nodes) + " must divide cp_size=" + std::to_string(cp_size));
    const int64_t min_rows = std::max<int64_t>(1, rule.min_rows);
    const std::vector<RowIndex> groups = group_remotes(needs, rule.num_nodes > 1 ? static_cast<size_t>(cp_size / rule.num_nodes) : 1);
    FineWork fine;
    if (rule.is_greedy) fine = measure_fine(slices, queries, needs, groups, min_rows);
    std::vector<StepSplit> splits;
    for (const int64_t degree : degrees) {
        if (degree < 1) throw InputError("degree=" + std::to_string(degree) + " must be at least 1");
        std::vector<std::vector<int32_t>> cuts;
        for (size_t group = 0; group < groups.size(); ++group) {
            const int64_t parts = parts_for(groups[group].num_rows(), degree, min_rows);
            cuts.push_back(rule.is_greedy ? greedy_cuts(groups[group], fine.cuts[group], fine.work[group], rule, parts)
                                          : equal_cuts(groups[group], parts, parts > 1 ? min_rows : 0));
        }
        std::vector<int32_t> first_parts;
        if (!rule.is_greedy) first_parts = choose_first_parts(groups, cuts, keys);
        splits.emplace_back(std::move(cuts), std::move(first_parts), static_cast<int32_t>(cp_size));
    }
    return splits;
}

}  // namespace magi
