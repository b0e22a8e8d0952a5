// Contiguous runs with the smallest possible largest area. Knows nothing of keys.
#include <numeric>

#include "solver/dispatch.h"

namespace magi {

namespace {

std::vector<int64_t> prefix_sums(std::span<const int64_t> values) {
    std::vector<int64_t> sums(values.size() + 1, 0);
    std::partial_sum(values.begin(), values.end(), sums.begin() + 1);
    return sums;
}

// First index past the longest run from `start` whose area is at most max_area.
int64_t longest_run(const std::vector<int64_t>& sums, int64_t start, int64_t max_area) {
    return std::upper_bound(sums.begin() + start, sums.end(), sums[start] + max_area) - sums.begin() - 1;
}

bool fits(const std::vector<int64_t>& sums, int32_t cp_size, int64_t max_area) {
    const int64_t n = static_cast<int64_t>(sums.size()) - 1;
    int64_t start = 0;
    for (int32_t rank = 0; rank < cp_size && start < n; ++rank) {
        const int64_t end = longest_run(sums, start, max_area);
        if (end == start) return false;
        start = end;
    }
    return start == n;
}

}  // namespace

int64_t min_max_area_by_search(std::span<const int64_t> areas, int32_t cp_size) {
    const std::vector<int64_t> sums = prefix_sums(areas);
    if (areas.empty()) return 0;
    int64_t low = std::max(*std::max_element(areas.begin(), areas.end()), (sums.back() + cp_size - 1) / cp_size);
    int64_t high = sums.back();
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (fits(sums, cp_size, middle))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

int64_t min_max_area_by_programming(std::span<const int64_t> areas, int32_t cp_size) {
    const std::vector<int64_t> sums = prefix_sums(areas);
    const int64_t n = static_cast<int64_t>(areas.size());
    // best[i]: smallest largest area of the first i chunks on the ranks seen so far. In the minimum over the last cut j of
    // max(best[j], sums[i] - sums[j]) the first grows and the second falls with j, and their crossing only moves right with i.
    std::vector<int64_t> best = sums, next(n + 1);
    for (int32_t rank = 1; rank < cp_size; ++rank) {
        int64_t cut = 0;
        for (int64_t i = 0; i <= n; ++i) {
            while (cut < i && best[cut] < sums[i] - sums[cut]) ++cut;
            next[i] = std::max(best[cut], sums[i] - sums[cut]);
            if (cut > 0) next[i] = std::min(next[i], std::max(best[cut - 1], sums[i] - sums[cut - 1]));
        }
        if (next == best) break;
        std::swap(best, next);
    }
    return best[n];
}

Owners cut_owners(const DispatchDesc& desc, int64_t max_area) {
    const int64_t n = desc.num_chunks(), ranks = desc.cp_size;
    const std::vector<int64_t> sums = prefix_sums(desc.areas);
    // first_start[r]: smallest index from which the ranks r.. can still take all the rest.
    std::vector<int64_t> first_start(ranks + 1, n);
    for (int64_t rank = ranks - 1; rank >= 0; --rank)
        first_start[rank] = std::lower_bound(sums.begin(), sums.end(), sums[first_start[rank + 1]] - max_area) - sums.begin();
    Owners owner(n);
    int64_t start = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
        const int64_t left = ranks - rank;
        const int64_t share = sums[start] + (sums[n] - sums[start]) / left;
        // The cuts whose area is nearest to an equal share; among them (rows that see nothing) equal tokens decide.
        int64_t low = std::lower_bound(sums.begin() + start, sums.end(), share) - sums.begin();
        if (low > start && share - sums[low - 1] < sums[low] - share) --low;
        const int64_t near = sums[low];
        low = std::lower_bound(sums.begin() + start, sums.end(), near) - sums.begin();
        const int64_t high = std::upper_bound(sums.begin() + low, sums.end(), near) - sums.begin() - 1;
        int64_t end = std::clamp(start + (n - start + left - 1) / left, low, high);
        end = std::clamp(end, std::max(start, first_start[rank + 1]), longest_run(sums, start, max_area));
        std::fill(owner.begin() + start, owner.begin() + end, static_cast<int32_t>(rank));
        start = end;
    }
    return owner;
}

}  // namespace magi
