// Clip, move, join: the same three steps for every mask.
#include "solver/local_slices.h"

#include <algorithm>
#include <tuple>

#include "solver/buffer_parts.h"

namespace magi {

namespace {

bool touch(int32_t a_start, int32_t a_end, int32_t b_start, int32_t b_end) { return a_start <= b_end && b_start <= a_end; }

// Joins with one of the slices from first_candidate on, the last one first; else appends.
void join_or_append(std::vector<Slice>& list, const Slice& s, size_t first_candidate) {
    for (size_t idx = list.size(); idx > first_candidate; --idx)
        if (try_join(list[idx - 1], s)) return;
    list.push_back(s);
}

// Joins neighbours in the given order of sorting; one pass.
template <class Key>
void join_sorted(std::vector<Slice>& list, Key key) {
    std::sort(list.begin(), list.end(), [&key](const Slice& a, const Slice& b) { return key(a) < key(b); });
    std::vector<Slice> joined;
    joined.reserve(list.size());
    for (const Slice& s : list) join_or_append(joined, s, joined.empty() ? 0 : joined.size() - 1);
    list = std::move(joined);
}

}  // namespace

bool try_join(Slice& into, const Slice& other) {
    if (!touch(into.q_start, into.q_end, other.q_start, other.q_end) || !touch(into.k_start, into.k_end, other.k_start, other.k_end))
        return false;
    const Slice hull{std::min(into.q_start, other.q_start), std::max(into.q_end, other.q_end), std::min(into.k_start, other.k_start),
                     std::max(into.k_end, other.k_end)};
    const int64_t into_area = area(into), other_area = area(other);
    // A band that joins them is one of theirs on each side, or none: try each pair once. Equal areas prove equal cells.
    const int32_t lows[3] = {into.lo, other.lo, -kUnbounded}, highs[3] = {into.hi, other.hi, kUnbounded};
    for (int lo = 0; lo < 3; ++lo) {
        if ((lo > 0 && lows[lo] == lows[0]) || (lo > 1 && lows[lo] == lows[1])) continue;
        for (int hi = 0; hi < 3; ++hi) {
            if ((hi > 0 && highs[hi] == highs[0]) || (hi > 1 && highs[hi] == highs[1])) continue;
            Slice joined = hull;
            joined.lo = lows[lo];
            joined.hi = highs[hi];
            if (area(joined) != into_area + other_area) continue;
            if (area(intersect(joined, into)) != into_area || area(intersect(joined, other)) != other_area) continue;
            into = joined;
            return true;
        }
    }
    return false;
}

std::vector<Slice> build_local_slices(std::span<const Slice> slices, const RowIndex& queries, const RowIndex& keys) {
    std::vector<Slice> list, previous, current;
    for (Slice s : slices) {
        if (!tighten(s)) continue;
        previous.clear();  // parts of this slice in the last run of queries that may still grow
        for (size_t idx = queries.run_after(s.q_start); idx < queries.runs().size() && queries.runs()[idx].start < s.q_end; ++idx) {
            const Interval run = queries.runs()[idx];
            Slice piece = clip(s, run.start, run.end, s.k_start, s.k_end);
            if (!tighten(piece)) continue;
            current.clear();
            for_each_buffer_part(piece, keys, [&](const Slice& part) {
                const Slice local = move(part, int64_t{queries.first_row(idx)} - run.start, 0);
                if (area(local) > 0) join_or_append(current, local, current.empty() ? 0 : current.size() - 1);
            });
            for (const Slice& part : current) {
                size_t match = 0;
                while (match < previous.size() && !try_join(previous[match], part)) ++match;
                if (match == previous.size()) previous.push_back(part);
            }
            // Only what ends at the last row of this run can continue in the next one.
            const int32_t end_row = queries.first_row(idx) + (run.end - run.start);
            const auto done =
                std::stable_partition(previous.begin(), previous.end(), [end_row](const Slice& part) { return part.q_end == end_row; });
            list.insert(list.end(), done, previous.end());
            previous.erase(done, previous.end());
        }
        list.insert(list.end(), previous.begin(), previous.end());
    }
    std::erase_if(list, [](Slice& s) { return !tighten(s); });
    // Slices that meet only in these buffers. With one run on both sides nothing new can meet, and one rank computes the mask as given.
    if (queries.runs().size() > 1 || keys.runs().size() > 1) {
        join_sorted(list, [](const Slice& s) { return std::tie(s.q_start, s.q_end, s.k_start, s.k_end, s.lo, s.hi); });
        join_sorted(list, [](const Slice& s) { return std::tie(s.k_start, s.k_end, s.q_start, s.q_end, s.lo, s.hi); });
    }
    for (Slice& s : list) tighten(s);
    std::sort(list.begin(), list.end(), [](const Slice& a, const Slice& b) {
        return std::tie(a.q_start, a.k_start, a.lo, a.q_end, a.k_end, a.hi) < std::tie(b.q_start, b.k_start, b.lo, b.q_end, b.k_end, b.hi);
    });
    return list;
}

}  // namespace magi
