// Pairs of runs and pairs of slices, nothing joined or skipped; knows nothing of plans.
#include "solver/rebuild.h"

#include <algorithm>
#include <string>

#include "base/arrays.h"

namespace magi {

namespace {

// The run that holds a row.
size_t run_of_row(const RowIndex& index, int32_t row) { return index.run_after(index.token_at(row)); }

}  // namespace

std::vector<Slice> globalize(std::span<const Slice> local, const RowIndex& queries, const RowIndex& keys) {
    std::vector<Slice> fragments;
    for (Slice s : local) {
        if (!tighten(s)) continue;
        if (s.q_start < 0 || s.k_start < 0 || s.q_end > queries.num_rows() || s.k_end > keys.num_rows())
            throw InputError("local slice q [" + std::to_string(s.q_start) + ", " + std::to_string(s.q_end) + ") k [" +
                             std::to_string(s.k_start) + ", " + std::to_string(s.k_end) + ") reaches outside " +
                             std::to_string(queries.num_rows()) + " query and " + std::to_string(keys.num_rows()) + " key rows");
        for (size_t q_run = run_of_row(queries, s.q_start); q_run < queries.runs().size() && queries.first_row(q_run) < s.q_end; ++q_run) {
            Slice rows = clip(s, queries.first_row(q_run), queries.first_row(q_run + 1), s.k_start, s.k_end);
            if (!tighten(rows)) continue;
            for (size_t k_run = run_of_row(keys, rows.k_start); k_run < keys.runs().size() && keys.first_row(k_run) < rows.k_end; ++k_run) {
                const Slice cells = clip(rows, rows.q_start, rows.q_end, keys.first_row(k_run), keys.first_row(k_run + 1));
                Slice fragment = move(cells, int64_t{queries.runs()[q_run].start} - queries.first_row(q_run),
                                      int64_t{keys.runs()[k_run].start} - keys.first_row(k_run));
                if (tighten(fragment)) fragments.push_back(fragment);
            }
        }
    }
    return fragments;
}

std::vector<int64_t> count_seen_cells(std::span<const Slice> fragments, std::span<const Slice> slices) {
    // The largest q_end so far bounds, from the left, which slices can still meet a row.
    std::vector<int32_t> reach;
    for (const Slice& s : slices) reach.push_back(reach.empty() ? s.q_end : std::max(reach.back(), s.q_end));
    std::vector<int64_t> seen;
    seen.reserve(fragments.size());
    for (const Slice& fragment : fragments) {
        int64_t cells = 0;
        auto idx = static_cast<size_t>(std::upper_bound(reach.begin(), reach.end(), fragment.q_start) - reach.begin());
        for (; idx < slices.size() && slices[idx].q_start < fragment.q_end; ++idx) cells += area(intersect(fragment, slices[idx]));
        seen.push_back(cells);
    }
    return seen;
}

}  // namespace magi
