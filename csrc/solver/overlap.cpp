// A sweep over query rows with the active slices in an ordered set by key. Must not walk cells or pairs of slices.
//
// Why neighbours suffice. In a tight slice every row is a non-empty key interval [start, end), and from row to row start
// and end each move by 0 or 1 (they are max(k_start, row + lo) and min(k_end, row + hi + 1)).
//   (1) If A lies left of B in row r and they share no cell, A lies left of B in row r + 1 while both are active: the other
//       order would need end_B(r+1) <= start_A(r+1), but start_A(r+1) <= start_A(r) + 1 <= end_A(r) <= start_B(r) < end_B(r)
//       <= end_B(r+1). So the order of the set stays right as long as no two active slices have met.
//   (2) If A and C share no cell in row r with B's interval between them, they share none in row r + 1:
//       end_A(r+1) <= end_A(r) + 1 <= start_B(r) + 1 <= end_B(r) <= start_C(r) <= start_C(r+1). So slices that meet first in
//       row r + 1, both active before, are neighbours in the set after the removals of that row.
//   (3) A slice inserted in row r into disjoint intervals and meeting any of them meets its predecessor or successor.
// Neighbours arise only by an insertion or by a removal between them, and both test the whole pair (not one row), so the
// first row with a doubly covered cell is never passed unnoticed; a pair test is exact, so nothing else is reported.
#include "solver/overlap.h"

#include <numeric>
#include <set>
#include <tuple>

namespace magi {

namespace {

// Orders active slices by where their interval starts in the current row.
struct ByKeyInRow {
    const Slice* slices;
    const int64_t* row;

    int64_t start(int32_t idx) const { return std::max<int64_t>(slices[idx].k_start, *row + slices[idx].lo); }
    // Equal starts mean a shared cell; the index only keeps both in the set until the neighbour test reports them.
    bool operator()(int32_t a, int32_t b) const { return std::pair(start(a), a) < std::pair(start(b), b); }
};

int64_t shared_cells(const Slice& a, const Slice& b) { return area(intersect(a, b)); }

}  // namespace

CanonicalSlices canonical_slices(std::span<const Slice> slices) {
    struct Entry {
        Slice slice;
        int32_t source;
    };
    std::vector<Entry> entries;
    entries.reserve(slices.size());
    for (size_t idx = 0; idx < slices.size(); ++idx) {
        Slice s = slices[idx];
        if (tighten(s)) entries.push_back({s, static_cast<int32_t>(idx)});
    }
    const auto before = [](const Entry& a, const Entry& b) {
        const Slice &x = a.slice, &y = b.slice;
        return std::tie(x.q_start, x.k_start, x.lo, x.hi, x.q_end, x.k_end, a.source) <
               std::tie(y.q_start, y.k_start, y.lo, y.hi, y.q_end, y.k_end, b.source);
    };
    std::sort(entries.begin(), entries.end(), before);
    CanonicalSlices out;
    out.slices.reserve(entries.size());
    out.source.reserve(entries.size());
    for (const Entry& entry : entries) {
        out.slices.push_back(entry.slice);
        out.source.push_back(entry.source);
    }
    return out;
}

std::optional<Overlap> find_overlap(std::span<const Slice> slices) {
    const auto num_slices = static_cast<int32_t>(slices.size());
    int64_t row = 0;
    std::set<int32_t, ByKeyInRow> active(ByKeyInRow{slices.data(), &row});
    using Position = std::set<int32_t, ByKeyInRow>::iterator;
    std::vector<Position> position(slices.size());
    std::vector<int32_t> by_end(slices.size());
    std::iota(by_end.begin(), by_end.end(), 0);
    std::sort(by_end.begin(), by_end.end(),
              [&](int32_t a, int32_t b) { return std::pair(slices[a].q_end, a) < std::pair(slices[b].q_end, b); });

    const auto test = [&](Position left, Position right) -> std::optional<Overlap> {
        const int64_t num_cells = shared_cells(slices[*left], slices[*right]);
        if (num_cells == 0) return std::nullopt;
        return Overlap{std::min(*left, *right), std::max(*left, *right), num_cells};
    };

    auto next_end = by_end.begin();
    for (int32_t idx = 0; idx < num_slices; ++idx) {
        row = slices[idx].q_start;
        // Removals first: comparisons are only valid among slices that cover the current row.
        for (; next_end != by_end.end() && slices[*next_end].q_end <= row; ++next_end) {
            const Position after = active.erase(position[*next_end]);
            if (after == active.begin() || after == active.end()) continue;
            if (const auto found = test(std::prev(after), after)) return found;
        }
        const Position here = active.insert(idx).first;
        position[idx] = here;
        if (here != active.begin())
            if (const auto found = test(std::prev(here), here)) return found;
        if (std::next(here) != active.end())
            if (const auto found = test(here, std::next(here))) return found;
    }
    // Slices still active may meet below the last insertion, once what lies between them has ended.
    for (; next_end != by_end.end(); ++next_end) {
        const Position after = active.erase(position[*next_end]);
        if (after == active.begin() || after == active.end()) continue;
        if (const auto found = test(std::prev(after), after)) return found;
    }
    return std::nullopt;
}

}  // namespace magi
