// One pass over (slice, run of queries) pairs; knows nothing of who sends.
#include "solver/needs.h"

#include <algorithm>
#include <string>

#include "base/arrays.h"
#include "solver/buffer_parts.h"

namespace magi {

namespace {

// A union that grows: compacted whenever it has doubled, so that many overlapping slices stay small.
class GrowingUnion {
public:
    void add(Interval interval) {
        if (!intervals_.empty()) {
            Interval& last = intervals_.back();
            if (interval.start >= last.start && interval.start <= last.end) {
                last.end = std::max(last.end, interval.end);
                return;
            }
        }
        intervals_.push_back(interval);
        if (intervals_.size() < limit_) return;
        normalize(intervals_);
        limit_ = 2 * intervals_.size() + kSlack;
    }

    Intervals take() {
        normalize(intervals_);
        return std::move(intervals_);
    }

private:
    static constexpr size_t kSlack = 1024;
    Intervals intervals_;
    size_t limit_ = kSlack;
};

void check_inside(std::span<const Slice> slices, int32_t total_q, int32_t total_k) {
    for (const Slice& s : slices) {
        if (has_no_rows(s)) continue;
        if (s.q_start < 0 || s.k_start < 0 || s.q_end > total_q || s.k_end > total_k)
            throw InputError("slice q [" + std::to_string(s.q_start) + ", " + std::to_string(s.q_end) + ") k [" +
                             std::to_string(s.k_start) + ", " + std::to_string(s.k_end) + ") reaches outside the dispatched " +
                             std::to_string(total_q) + " queries and " + std::to_string(total_k) + " keys");
    }
}

}  // namespace

Needs compute_needs(std::span<const Slice> slices, const Ownership& queries, const Ownership& keys) {
    check_inside(slices, queries.total_tokens(), keys.total_tokens());
    const auto cp_size = static_cast<size_t>(queries.cp_size());
    Needs needs;
    needs.areas.assign(cp_size, 0);
    needs.local_areas.assign(cp_size, 0);
    std::vector<GrowingUnion> seen(cp_size);
    for_each_piece(slices, queries, [&](const OwnedRun& run, const Slice& piece) {
        const auto rank = static_cast<size_t>(run.owner);
        seen[rank].add({piece.k_start, piece.k_end});
        needs.areas[rank] += area(piece);
        needs.local_areas[rank] += area_in_buffer(piece, keys.rows_of(run.owner));
    });
    needs.remote.reserve(cp_size);
    for (size_t rank = 0; rank < cp_size; ++rank)
        needs.remote.emplace_back(subtract(seen[rank].take(), keys.rows_of(static_cast<int32_t>(rank)).runs()));
    return needs;
}

std::vector<Intervals> keys_entering_nodes(const Needs& needs, const Ownership& keys, int64_t num_nodes) {
    const size_t node_size = needs.remote.size() / static_cast<size_t>(num_nodes);
    std::vector<Intervals> nodes;
    for (size_t first = 0; first < needs.remote.size(); first += node_size) {
        Intervals wanted, owned;
        for (size_t rank = first; rank < first + node_size; ++rank) {
            const Intervals& remote = needs.remote[rank].runs();
            const Intervals& own = keys.rows_of(static_cast<int32_t>(rank)).runs();
            wanted.insert(wanted.end(), remote.begin(), remote.end());
            owned.insert(owned.end(), own.begin(), own.end());
        }
        normalize(wanted);
        normalize(owned);
        nodes.push_back(subtract(wanted, owned));
    }
    return nodes;
}

std::vector<std::vector<int64_t>> remote_areas(std::span<const Slice> slices, const Ownership& queries, const Needs& needs,
                                               const std::vector<std::vector<int32_t>>& cuts) {
    std::vector<std::vector<int64_t>> areas(cuts.size());
    for (size_t rank = 0; rank < cuts.size(); ++rank) areas[rank].assign(cuts[rank].empty() ? 0 : cuts[rank].size() - 1, 0);
    for_each_piece(slices, queries, [&](const OwnedRun& run, const Slice& piece) {
        const auto rank = static_cast<size_t>(run.owner);
        const std::vector<int32_t>& cut = cuts[rank];
        const auto first = std::upper_bound(cut.begin(), cut.end(), piece.k_start);
        size_t window = first == cut.begin() ? 0 : static_cast<size_t>(first - cut.begin()) - 1;
        for (; window + 1 < cut.size() && cut[window] < piece.k_end; ++window) {
            Slice inside = clip(piece, piece.q_start, piece.q_end, cut[window], cut[window + 1]);
            if (tighten(inside)) areas[rank][window] += area_in_buffer(inside, needs.remote[rank]);
        }
    });
    return areas;
}

}  // namespace magi
