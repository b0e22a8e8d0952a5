// Chunk areas, key unions, remote rows and border estimates against brute force over cells.
#include "solver/chunk_area.h"

#include <set>

#include "check.h"
#include "solver/remote_rows.h"

using namespace magi;
using namespace magi::test;

namespace {

void check_against_cells(const std::vector<Slice>& slices, int32_t total_q, int32_t total_k, int64_t chunk_size, Random& random) {
    const ChunkGrid grid{total_q, chunk_size};
    const std::vector<int64_t> areas = chunk_areas(slices, grid);
    const ChunkNeeds needs = chunk_needs(slices, grid);
    CHECK_EQUAL(static_cast<int64_t>(areas.size()), grid.num_chunks());
    std::vector<std::set<int64_t>> keys(areas.size());
    for (int64_t chunk = 0; chunk < grid.num_chunks(); ++chunk) {
        int64_t cells = 0;
        for (const Slice& s : slices)
            for (int64_t i = grid.start(chunk); i < grid.end(chunk); ++i)
                for (int64_t j = 0; j < total_k; ++j)
                    if (sees(s, i, j)) ++cells, keys[chunk].insert(j);
        CHECK_EQUAL(areas[chunk], cells);
        std::set<int64_t> listed;
        int64_t previous_end = -1;
        for (const Interval need : needs.of(chunk)) {
            CHECK(need.start > previous_end && need.start < need.end);
            previous_end = need.end;
            for (int64_t j = need.start; j < need.end; ++j) listed.insert(j);
        }
        CHECK(listed == keys[chunk]);
    }

    const auto cp_size = static_cast<int32_t>(random.between(1, 4));
    std::vector<int32_t> owner(areas.size());
    for (int32_t& rank : owner) rank = static_cast<int32_t>(random.between(0, cp_size - 1));
    for (const bool owns_keys : {false, true}) {
        int64_t rows = 0;
        for (int32_t rank = 0; rank < cp_size; ++rank) {
            std::set<int64_t> needed;
            for (size_t chunk = 0; chunk < owner.size(); ++chunk)
                if (owner[chunk] == rank) needed.insert(keys[chunk].begin(), keys[chunk].end());
            for (const int64_t key : needed) {
                const bool is_local = owns_keys && key < total_q && owner[key / chunk_size] == rank;
                rows += !is_local;
            }
        }
        CHECK_EQUAL(remote_rows(grid, needs, owner, cp_size, owns_keys), rows);
    }

    // The estimate is 0 exactly where no visible pair lies across the border.
    const std::vector<int64_t> borders = border_rows(grid, needs, true);
    for (int64_t border = 1; border < grid.num_chunks(); ++border) {
        bool crosses = false;
        for (size_t chunk = 0; chunk < keys.size(); ++chunk)
            for (const int64_t key : keys[chunk]) crosses |= (static_cast<int64_t>(chunk) < border) != (key / chunk_size < border);
        CHECK_EQUAL(borders[border] > 0, crosses);
    }
}

}  // namespace

int main() {
    Random random(11);
    for (int round = 0; round < 400; ++round) {
        const auto total_q = static_cast<int32_t>(random.between(0, 24)), total_k = static_cast<int32_t>(random.between(0, 24));
        std::vector<Slice> slices(random.between(0, 5));
        for (Slice& s : slices) s = random.slice(total_q, total_k);
        // The formulas count what slices cover; slices of one mask never overlap, so make them disjoint by rows of keys.
        for (size_t i = 0; i < slices.size(); ++i) {
            slices[i].k_start = std::max<int32_t>(slices[i].k_start, static_cast<int32_t>(total_k * i / slices.size()));
            slices[i].k_end = std::min<int32_t>(slices[i].k_end, static_cast<int32_t>(total_k * (i + 1) / slices.size()));
        }
        check_against_cells(slices, total_q, total_k, random.between(1, 7), random);
    }
    return report("chunk_area");
}
