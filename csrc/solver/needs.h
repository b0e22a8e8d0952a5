// What every rank needs: the keys its queries see, and how much work they are. Compact: no table of transfers.
// Plain C++20; knows nothing of steps or exchanges.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/slice.h"
#include "solver/intervals.h"
#include "solver/ownership.h"

namespace magi {

struct Needs {
    std::vector<RowIndex> remote;      // per rank: needed keys that it does not own, ascending
    std::vector<int64_t> areas;        // per rank: visible pairs of its queries
    std::vector<int64_t> local_areas;  // per rank: of these, pairs with its own keys
};

// Calls visit(run, piece) for the non-empty tightened part of each slice in each run of queries.
template <class Visit>
void for_each_piece(std::span<const Slice> slices, const Ownership& queries, Visit visit) {
    for (Slice s : slices) {
        if (!tighten(s)) continue;
        for (size_t idx = queries.run_at(s.q_start); idx < queries.runs().size() && queries.runs()[idx].start < s.q_end; ++idx) {
            const OwnedRun& run = queries.runs()[idx];
            Slice piece = clip(s, run.start, run.end, s.k_start, s.k_end);
            if (tighten(piece)) visit(run, piece);
        }
    }
}

// Slices must lie inside the tokens of both sides; throws InputError otherwise.
Needs compute_needs(std::span<const Slice> slices, const Ownership& queries, const Ownership& keys);

// Per node of consecutive ranks: the tokens that its ranks need and none of them owns.
std::vector<Intervals> keys_entering_nodes(const Needs& needs, const Ownership& keys, int64_t num_nodes);

// Remote area of each rank in consecutive token windows: cuts[rank] has ascending tokens, result[rank] one number per window
// [cuts[w], cuts[w + 1]).
std::vector<std::vector<int64_t>> remote_areas(std::span<const Slice> slices, const Ownership& queries, const Needs& needs,
                                               const std::vector<std::vector<int32_t>>& cuts);

}  // namespace magi
