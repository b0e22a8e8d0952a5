// A slice seen through a buffer that holds only some keys, in ascending token order.
// Plain C++20; knows nothing of ranks or steps.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/slice.h"
#include "solver/intervals.h"

namespace magi {

// Cuts a tightened slice by the runs of the buffer and moves the keys of each part to buffer rows; queries stay where they are.
// Columns that every row of the slice sees need no band, so all their runs become one part however many there are;
// only where the band binds is there one part a run. Parts keep all rows of the slice (tighten afterwards), k ascending.
template <class Visit>
void for_each_buffer_part(const Slice& s, const RowIndex& keys, Visit visit) {
    const auto visit_runs = [&](int64_t k_start, int64_t k_end) {
        for (size_t idx = keys.run_after(k_start); idx < keys.runs().size() && keys.runs()[idx].start < k_end && k_start < k_end; ++idx) {
            const Interval run = keys.runs()[idx];
            const Slice part = clip(s, s.q_start, s.q_end, std::max(run.start, static_cast<int32_t>(k_start)),
                                    std::min(run.end, static_cast<int32_t>(k_end)));
            visit(move(part, 0, int64_t{keys.first_row(idx)} - run.start));
        }
    };
    const int64_t full_start = std::clamp<int64_t>(int64_t{s.q_end} - 1 + s.lo, s.k_start, s.k_end);
    const int64_t full_end = std::clamp<int64_t>(int64_t{s.q_start} + s.hi + 1, s.k_start, s.k_end);
    if (full_start >= full_end) return visit_runs(s.k_start, s.k_end);
    visit_runs(s.k_start, full_start);
    const int32_t first = keys.rows_before(full_start), end = keys.rows_before(full_end);
    if (first < end) visit(Slice{s.q_start, s.q_end, first, end, -kUnbounded, kUnbounded});
    visit_runs(full_end, s.k_end);
}

// Visible pairs of a tightened slice with the keys of the buffer.
inline int64_t area_in_buffer(const Slice& s, const RowIndex& keys) {
    int64_t pairs = 0;
    for_each_buffer_part(s, keys, [&pairs](const Slice& part) { pairs += area(part); });
    return pairs;
}

}  // namespace magi
