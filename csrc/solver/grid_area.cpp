// Cuts each slice by the grid's rows, tightens the band, and visits only the cells the band can reach.
#include "solver/grid_area.h"

namespace magi {

std::vector<int64_t> grid_area(std::span<const Slice> slices, std::span<const int32_t> q_edges, std::span<const int32_t> k_edges) {
    if (q_edges.size() < 2 || k_edges.size() < 2) return {};
    const size_t num_q = q_edges.size() - 1, num_k = k_edges.size() - 1;
    std::vector<int64_t> areas(num_q * num_k, 0);
    // Index of the cell that holds `token`, 0 when it lies before the grid.
    const auto cell_of = [](std::span<const int32_t> edges, int32_t token) {
        const auto after = std::upper_bound(edges.begin(), edges.end(), token);
        return static_cast<size_t>(std::max<std::ptrdiff_t>(after - edges.begin() - 1, 0));
    };
    for (const Slice& slice : slices) {
        for (size_t a = cell_of(q_edges, slice.q_start); a < num_q && q_edges[a] < slice.q_end; ++a) {
            Slice band = clip(slice, q_edges[a], q_edges[a + 1], k_edges.front(), k_edges.back());
            if (!tighten(band)) continue;
            for (size_t b = cell_of(k_edges, band.k_start); b < num_k && k_edges[b] < band.k_end; ++b)
                areas[a * num_k + b] += area(clip(band, band.q_start, band.q_end, k_edges[b], k_edges[b + 1]));
        }
    }
    return areas;
}

}  // namespace magi
