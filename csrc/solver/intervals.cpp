// Interval algebra by sorting and two pointers; knows nothing of who owns a token.
#include "solver/intervals.h"

#include <algorithm>

namespace magi {

void normalize(Intervals& intervals) {
    const auto by_start = [](Interval a, Interval b) { return a.start < b.start; };
    if (!std::is_sorted(intervals.begin(), intervals.end(), by_start)) std::sort(intervals.begin(), intervals.end(), by_start);
    size_t kept = 0;
    for (const Interval interval : intervals) {
        if (interval.start >= interval.end) continue;
        if (kept > 0 && interval.start <= intervals[kept - 1].end)
            intervals[kept - 1].end = std::max(intervals[kept - 1].end, interval.end);
        else
            intervals[kept++] = interval;
    }
    intervals.resize(kept);
}

Intervals subtract(std::span<const Interval> from, std::span<const Interval> taken) {
    Intervals rest;
    size_t next = 0;
    for (Interval piece : from) {
        while (next < taken.size() && taken[next].end <= piece.start) ++next;
        for (size_t idx = next; idx < taken.size() && taken[idx].start < piece.end; ++idx) {
            if (piece.start < taken[idx].start) rest.push_back({piece.start, taken[idx].start});
            piece.start = std::max(piece.start, taken[idx].end);
        }
        if (piece.start < piece.end) rest.push_back(piece);
    }
    return rest;
}

Intervals clip(std::span<const Interval> intervals, Interval window) {
    Intervals inside;
    auto it = std::partition_point(intervals.begin(), intervals.end(), [&](Interval run) { return run.end <= window.start; });
    for (; it != intervals.end() && it->start < window.end; ++it)
        inside.push_back({std::max(it->start, window.start), std::min(it->end, window.end)});
    return inside;
}

int64_t num_tokens(std::span<const Interval> intervals) {
    int64_t total = 0;
    for (const Interval run : intervals) total += run.end - run.start;
    return total;
}

RowIndex::RowIndex(Intervals runs) : runs_(std::move(runs)), first_rows_(runs_.size() + 1, 0) {
    for (size_t idx = 0; idx < runs_.size(); ++idx) first_rows_[idx + 1] = first_rows_[idx] + (runs_[idx].end - runs_[idx].start);
}

size_t RowIndex::run_after(int64_t token) const {
    const auto it = std::partition_point(runs_.begin(), runs_.end(), [token](Interval run) { return run.end <= token; });
    return static_cast<size_t>(it - runs_.begin());
}

int32_t RowIndex::rows_before(int64_t token) const {
    const size_t idx = run_after(token);
    if (idx == runs_.size()) return num_rows();
    return first_rows_[idx] + static_cast<int32_t>(std::max<int64_t>(0, token - runs_[idx].start));
}

int32_t RowIndex::token_at(int32_t row) const {
    const auto it = std::upper_bound(first_rows_.begin(), first_rows_.end(), row);
    const auto idx = static_cast<size_t>(it - first_rows_.begin()) - 1;
    return runs_[idx].start + (row - first_rows_[idx]);
}

}  // namespace magi
