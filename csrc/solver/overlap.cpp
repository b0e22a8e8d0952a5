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

// Two non-negative numbers as one, so that sorting compares once.
struct Keyed {
    uint64_t key;
    int32_t idx;
};

uint64_t packed(int32_t major, int32_t minor) { return uint64_t{static_cast<uint32_t>(major)} << 32 | static_cast<uint32_t>(minor); }

int64_t shared_cells(const Slice& a, const Slice& b) { return area(intersect(a, b)); }

}  // namespace

CanonicalSlices canonical_slices(std::span<const Slice> slices) {
    std::vector<Slice> tight(slices.begin(), slices.end());
    std::vector<Keyed> order;
    order.reserve(slices.size());
    for (size_t idx = 0; idx < tight.size(); ++idx)
        if (tighten(tight[idx])) order.push_back({packed(tight[idx].q_start, tight[idx].k_start), static_cast<int32_t>(idx)});
    // A tight slice holds its corner (q_start, k_start), so only slices that overlap have equal keys.
    const auto rest = [&](const Keyed& entry) {
        const Slice& s = tight[entry.idx];
        return std::tuple(s.lo, s.hi, s.q_end, s.k_end, entry.idx);
    };
    std::sort(order.begin(), order.end(),
              [&](const Keyed& a, const Keyed& b) { return a.key != b.key ? a.key < b.key : rest(a) < rest(b); });
    CanonicalSlices out;
    out.slices.reserve(order.size());
    out.source.reserve(order.size());
    for (const Keyed& entry : order) {
        out.slices.push_back(tight[entry.idx]);
        out.source.push_back(entry.idx);
    }
    return out;
}

std::optional<Overlap> find_overlap(std::span<const Slice> slices) {
    const auto num_slices = static_cast<int32_t>(slices.size());
    int64_t row = 0;
    std::set<int32_t, ByKeyInRow> active(ByKeyInRow{slices.data(), &row});
    using Position = std::set<int32_t, ByKeyInRow>::iterator;
    std::vector<Position> position(slices.size());
    std::vector<uint64_t> by_end(slices.size());  // (q_end, position)
    for (int32_t idx = 0; idx < num_slices; ++idx) by_end[idx] = packed(slices[idx].q_end, idx);
    std::sort(by_end.begin(), by_end.end());
    const auto idx_of = [](uint64_t entry) { return static_cast<int32_t>(entry & 0xffffffffu); };

    const auto test = [&](Position left, Position right) -> std::optional<Overlap> {
        const int64_t num_cells = shared_cells(slices[*left], slices[*right]);
        if (num_cells == 0) return std::nullopt;
        return Overlap{std::min(*left, *right), std::max(*left, *right), num_cells};
    };

    auto next_end = by_end.begin();
    for (int32_t idx = 0; idx < num_slices; ++idx) {
        row = slices[idx].q_start;
        // Removals first: comparisons are only valid among slices that cover the current row.
        for (; next_end != by_end.end() && slices[idx_of(*next_end)].q_end <= row; ++next_end) {
            const Position after = active.erase(position[idx_of(*next_end)]);
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
        const Position after = active.erase(position[idx_of(*next_end)]);
        if (after == active.begin() || after == active.end()) continue;
        if (const auto found = test(std::prev(after), after)) return found;
    }
    return std::nullopt;
}

}  // namespace magi
