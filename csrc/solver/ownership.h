// Who owns which tokens: chunk owners as runs, and each rank's own rows.
// Plain C++20; knows nothing of masks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "solver/intervals.h"

namespace magi {

// A maximal run of tokens of one owner; first_row is where it starts in the owner's local buffer.
struct OwnedRun {
    int32_t start = 0, end = 0, owner = 0, first_row = 0;
};

class Ownership {
public:
    // chunk_owner[c] owns tokens [c * chunk_size, (c + 1) * chunk_size), the last chunk up to total_tokens.
    // Throws InputError when the chunks do not cover the tokens or an owner is not a rank.
    Ownership(std::span<const int32_t> chunk_owner, int64_t chunk_size, int64_t total_tokens, int64_t cp_size);

    int32_t cp_size() const { return static_cast<int32_t>(rows_.size()); }
    int32_t total_tokens() const { return runs_.empty() ? 0 : runs_.back().end; }
    // All runs, ascending; together they tile [0, total_tokens).
    const std::vector<OwnedRun>& runs() const { return runs_; }
    // Index of the run that holds the token, 0 <= token < total_tokens.
    size_t run_at(int32_t token) const;
    // The rank's local buffer.
    const RowIndex& rows_of(int32_t rank) const { return rows_[static_cast<size_t>(rank)]; }

private:
    int64_t chunk_size_;
    std::vector<OwnedRun> runs_;
    std::vector<int32_t> run_of_chunk_;
    std::vector<RowIndex> rows_;
};

// Calls visit(part, owned run) for the part of the interval in each owner's run, ascending.
template <class Visit>
void for_each_owned_part(Interval interval, const Ownership& owners, Visit visit) {
    if (interval.start >= interval.end) return;
    for (size_t idx = owners.run_at(interval.start); idx < owners.runs().size() && owners.runs()[idx].start < interval.end; ++idx) {
        const OwnedRun& run = owners.runs()[idx];
        visit(Interval{std::max(interval.start, run.start), std::min(interval.end, run.end)}, run);
    }
}

}  // namespace magi
