// Sorted sets of tokens as half-open intervals, and the row each token has in a buffer that holds such a set in order.
// Plain C++20; knows nothing of masks, ranks or steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace magi {

struct Interval {
    int32_t start = 0, end = 0;

    friend bool operator==(const Interval&, const Interval&) = default;
};

// Ascending, disjoint, non-empty, and not touching, once normalized.
using Intervals = std::vector<Interval>;

// Sorts, drops empty intervals and joins the ones that touch or overlap.
void normalize(Intervals& intervals);

// Both inputs normalized; so is the result.
Intervals subtract(std::span<const Interval> from, std::span<const Interval> taken);

// The part of a normalized set inside the window.
Intervals clip(std::span<const Interval> intervals, Interval window);

int64_t num_tokens(std::span<const Interval> intervals);

// Buffer rows of a normalized set that lies in a buffer in ascending order, first token in row 0.
class RowIndex {
public:
    RowIndex() = default;
    explicit RowIndex(Intervals runs);

    const Intervals& runs() const { return runs_; }
    int32_t num_rows() const { return first_rows_.empty() ? 0 : first_rows_.back(); }
    int32_t first_row(size_t run_idx) const { return first_rows_[run_idx]; }
    // Index of the first run that ends after the token.
    size_t run_after(int64_t token) const;
    // Rows whose token is below the given one.
    int32_t rows_before(int64_t token) const;
    // The token in a row, 0 <= row < num_rows().
    int32_t token_at(int32_t row) const;

private:
    Intervals runs_;
    std::vector<int32_t> first_rows_;  // [runs + 1]
};

}  // namespace magi
