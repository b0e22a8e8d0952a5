// Intersects wanted tokens with owned runs; knows nothing of why a row is wanted.
#include "solver/exchange.h"

#include <algorithm>
#include <string>

#include "base/arrays.h"

namespace magi {

void RowRuns::add(RowRun run) {
    if (!runs_.empty()) {
        RowRun& last = runs_.back();
        if (last.peer == run.peer && last.first_row + last.rows == run.first_row) {
            last.rows += run.rows;
            return;
        }
    }
    runs_.push_back(run);
}

void RowRuns::sort_by_peer() {
    std::vector<RowRun> sorted = std::move(runs_);
    std::stable_sort(sorted.begin(), sorted.end(), [](const RowRun& a, const RowRun& b) { return a.peer < b.peer; });
    runs_.clear();
    for (const RowRun& run : sorted) add(run);
}

ExchangeRuns build_step_exchange(const Ownership& keys, const Needs& needs, const StepSplit& split, int32_t rank, int32_t step) {
    ExchangeRuns exchange;
    const RowIndex& own = keys.rows_of(rank);
    exchange.num_rows_in = own.num_rows();
    for (const Interval run : clip(needs.remote[static_cast<size_t>(rank)].runs(), split.window(rank, step))) {
        for_each_owned_part(run, keys, [&](Interval part, const OwnedRun& owned) {
            exchange.recv.add({owned.owner, exchange.num_rows_out, part.end - part.start});
            exchange.num_rows_out += part.end - part.start;
        });
    }
    exchange.recv.sort_by_peer();
    for (int32_t peer = 0; peer < keys.cp_size(); ++peer) {
        if (peer == rank) continue;
        for (const Interval run : clip(needs.remote[static_cast<size_t>(peer)].runs(), split.window(peer, step)))
            for_each_own_row_run(run, own, [&](int32_t row, int32_t rows) { exchange.send.add({peer, row, rows}); });
    }
    return exchange;
}

ExchangeRuns build_wanted_exchange(const Ownership& keys, const std::vector<std::span<const Interval>>& wanted, int32_t rank) {
    ExchangeRuns exchange;
    const RowIndex& own = keys.rows_of(rank);
    exchange.num_rows_in = own.num_rows();
    for (size_t peer = 0; peer < wanted.size(); ++peer) {
        for (const Interval range : wanted[peer]) {
            if (range.start < 0 || range.end > keys.total_tokens() || range.start > range.end)
                throw InputError("wanted[" + std::to_string(peer) + "] has the range [" + std::to_string(range.start) + ", " +
                                 std::to_string(range.end) + "), which is not inside the " + std::to_string(keys.total_tokens()) +
                                 " tokens");
            for_each_own_row_run(range, own,
                                 [&](int32_t row, int32_t rows) { exchange.send.add({static_cast<int32_t>(peer), row, rows}); });
        }
    }
    for (const Interval range : wanted[static_cast<size_t>(rank)]) {
        for_each_owned_part(range, keys, [&](Interval part, const OwnedRun& owned) {
            exchange.recv.add({owned.owner, exchange.num_rows_out, part.end - part.start});
            exchange.num_rows_out += part.end - part.start;
        });
    }
    exchange.recv.sort_by_peer();
    return exchange;
}

}  // namespace magi
