// One rank's view of one exchange of rows, in wire order (magi_attention/plan/types.py: Exchange).
// Plain C++20; knows nothing of masks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "solver/steps.h"

namespace magi {

// `rows` rows from `first_row` of a buffer, to or from a peer.
struct RowRun {
    int32_t peer = 0, first_row = 0, rows = 0;
};

// Runs in wire order, neighbours joined where rows continue.
class RowRuns {
public:
    void add(RowRun run);
    // Stable by peer; joins what became neighbours.
    void sort_by_peer();
    const std::vector<RowRun>& runs() const { return runs_; }

private:
    std::vector<RowRun> runs_;
};

struct ExchangeRuns {
    RowRuns send, recv;
    int32_t num_rows_in = 0, num_rows_out = 0;
};

// Calls visit(row, rows) for the rows of the local buffer whose tokens are in the interval, ascending.
template <class Visit>
void for_each_own_row_run(Interval interval, const RowIndex& own, Visit visit) {
    const int32_t first = own.rows_before(interval.start), end = own.rows_before(interval.end);
    if (first < end) visit(first, end - first);
}

// The remote step's exchange of `rank`: receives its remote keys in the step's window, sends the peers theirs.
ExchangeRuns build_step_exchange(const Ownership& keys, const Needs& needs, const StepSplit& split, int32_t rank, int32_t step);

// General form: wanted[r] are the token ranges that rank r receives, in the order of its buffer; own tokens are sent to itself.
// Throws InputError when a range reaches outside the tokens.
ExchangeRuns build_wanted_exchange(const Ownership& keys, const std::vector<std::span<const Interval>>& wanted, int32_t rank);

}  // namespace magi
