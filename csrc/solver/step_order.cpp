// One greedy pass over the receivers; knows nothing of link speeds.
#include "solver/step_order.h"

#include <algorithm>

namespace magi {

namespace {

// More pieces than this average out by themselves, and the pass must stay cheap on a thousand ranks.
constexpr size_t kMaxPieces = 1 << 15;
// Rows asked of one owner are counted up to here, four times all tokens there can be: sums of products then fit 63 bits.
constexpr int64_t kMaxAsked = int64_t{1} << 32;

struct OwnerRows {
    int32_t part = 0, owner = 0;
    int64_t rows = 0;
};

int32_t parts_of(const std::vector<int32_t>& cuts) { return cuts.empty() ? 0 : static_cast<int32_t>(cuts.size()) - 1; }

int32_t ring_start(const std::vector<int32_t>& cuts, int64_t place) {
    const int32_t parts = parts_of(cuts);
    const auto num_before = static_cast<int32_t>(std::lower_bound(cuts.begin(), cuts.begin() + parts, place) - cuts.begin());
    return num_before > 0 ? num_before - 1 : std::max(parts - 1, 0);
}

// Rows of each owner in each part; stops early, leaving `pieces` over its limit, when they are many.
void collect(const RowIndex& wanted, const std::vector<int32_t>& cuts, const Ownership& keys, std::vector<OwnerRows>& pieces) {
    for (int32_t part = 0; part < parts_of(cuts); ++part) {
        const Interval window{cuts[static_cast<size_t>(part)], cuts[static_cast<size_t>(part) + 1]};
        for (const Interval run : clip(wanted.runs(), window)) {
            for_each_owned_part(
                run, keys, [&](Interval rows, const OwnedRun& owned) { pieces.push_back({part, owned.owner, rows.end - rows.start}); });
            if (pieces.size() > kMaxPieces) return;
        }
    }
}

}  // namespace

std::vector<int32_t> choose_first_parts(std::span<const RowIndex> wanted, const std::vector<std::vector<int32_t>>& cuts,
                                        const Ownership& keys) {
    std::vector<int32_t> first;
    std::vector<OwnerRows> pieces;
    std::vector<size_t> ends;
    size_t degree = 0;
    for (size_t group = 0; group < cuts.size(); ++group) {
        first.push_back(ring_start(cuts[group], static_cast<int64_t>(group) * keys.total_tokens() / static_cast<int64_t>(cuts.size())));
        degree = std::max(degree, static_cast<size_t>(parts_of(cuts[group])));
        if (pieces.size() <= kMaxPieces) collect(wanted[group], cuts[group], keys, pieces);
        ends.push_back(pieces.size());
    }
    if (degree < 2 || pieces.size() > kMaxPieces) return first;

    const auto cp_size = static_cast<size_t>(keys.cp_size());
    std::vector<int64_t> asked(degree * cp_size, 0);  // rows, per step and owner
    size_t start = 0;
    for (size_t group = 0; group < cuts.size(); ++group) {
        const int32_t parts = parts_of(cuts[group]);
        const std::span<const OwnerRows> ours(pieces.data() + start, ends[group] - start);
        start = ends[group];
        if (parts == 0) continue;
        // Part p is taken in step (first - p) mod parts.
        const auto slot = [&](const OwnerRows& piece, int32_t begin) {
            return static_cast<size_t>((begin + parts - piece.part) % parts) * cp_size + static_cast<size_t>(piece.owner);
        };
        int64_t least = -1;
        const int32_t ring = first[group];
        for (int32_t turn = 0; turn < parts; ++turn) {
            const int32_t begin = (ring + turn) % parts;
            int64_t met = 0;
            for (const OwnerRows& piece : ours) met += piece.rows * asked[slot(piece, begin)];
            if (least < 0 || met < least) {
                least = met;
                first[group] = begin;
            }
        }
        for (const OwnerRows& piece : ours) {
            int64_t& rows = asked[slot(piece, first[group])];
            rows = std::min(rows + piece.rows, kMaxAsked);
        }
    }
    return first;
}

}  // namespace magi
