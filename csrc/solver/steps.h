// The split of remote keys in steps: a rule that every rank can evaluate for every receiver.
// Plain C++20; knows nothing of who sends or of local slices.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "solver/needs.h"

namespace magi {

// Costs in femtoseconds, as integers; greedy arithmetic on them is plain IEEE double, equal on every machine.
struct StepRule {
    int64_t num_nodes = 1;      // ranks of one node share their cuts, so that a row crosses to a node in one step
    int64_t min_rows = 1;       // no step receives less, unless it is the only one
    bool is_greedy = false;     // false: equal rows; true: a step receives what the step before it can hide
    int64_t pair_cost_fs = 0;   // compute, per visible pair
    int64_t row_cost_fs = 0;    // exchange, per row
    int64_t start_cost_fs = 0;  // exchange, per step
};

// Remote steps of all ranks. Step s of a rank receives its remote keys inside one window of tokens.
class StepSplit {
public:
    // cuts: per group of ranks that cut alike, ascending tokens [parts + 1] or empty.
    // first_parts: per group, see step_order.h; empty: parts in ascending order.
    StepSplit(std::vector<std::vector<int32_t>> cuts, std::vector<int32_t> first_parts, int32_t cp_size);

    // Number of remote steps, equal on all ranks; 0 when no rank has remote keys.
    int32_t degree() const { return degree_; }
    // Tokens of remote step 0 <= step < degree() of the rank; empty when it has fewer parts.
    Interval window(int32_t rank, int32_t step) const;
    // Ascending cut tokens of the rank's parts, [parts + 1] or empty.
    const std::vector<int32_t>& cuts_of(int32_t rank) const { return cuts_[group_of(rank)]; }

private:
    size_t group_of(int32_t rank) const { return static_cast<size_t>(rank / group_size_); }

    std::vector<std::vector<int32_t>> cuts_;
    std::vector<int32_t> first_parts_;
    int32_t group_size_;
    int32_t degree_ = 0;
};

// One split per wanted degree (each at least 1); the result has fewer steps where rows do not suffice.
// Throws InputError when cp_size is not a multiple of num_nodes.
std::vector<StepSplit> split_steps(std::span<const Slice> slices, const Ownership& queries, const Ownership& keys, const Needs& needs,
                                   const StepRule& rule, std::span<const int64_t> degrees);

}  // namespace magi
