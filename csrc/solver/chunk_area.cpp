// Closed-form areas and key unions of chunks. Knows nothing of ranks.
#include "solver/chunk_area.h"

namespace magi {

namespace {

// Calls visit(chunk, the non-empty part of the slice inside the chunk).
template <class Visit>
void for_each_touch(std::span<const Slice> slices, const ChunkGrid& grid, Visit visit) {
    for (Slice s : slices) {
        if (!tighten(s)) continue;
        const int64_t first = s.q_start / grid.chunk_size;
        const int64_t last = (int64_t{s.q_end} - 1) / grid.chunk_size;
        for (int64_t chunk = first; chunk <= last; ++chunk) {
            Slice part = s;
            part.q_start = static_cast<int32_t>(std::max<int64_t>(s.q_start, grid.start(chunk)));
            part.q_end = static_cast<int32_t>(std::min<int64_t>(s.q_end, grid.end(chunk)));
            visit(chunk, part);
        }
    }
}

}  // namespace

std::vector<int64_t> chunk_areas(std::span<const Slice> slices, const ChunkGrid& grid) {
    std::vector<int64_t> areas(grid.num_chunks(), 0);
    for_each_touch(slices, grid, [&](int64_t chunk, const Slice& part) { areas[chunk] += area(part); });
    return areas;
}

ChunkNeeds chunk_needs(std::span<const Slice> slices, const ChunkGrid& grid) {
    const int64_t num_chunks = grid.num_chunks();
    std::vector<int64_t> place(num_chunks + 1, 0);
    for_each_touch(slices, grid, [&](int64_t chunk, const Slice&) { ++place[chunk + 1]; });
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) place[chunk + 1] += place[chunk];
    Intervals raw(place[num_chunks]);
    std::vector<int64_t> cursor = place;
    // A tightened band part reaches every key column of its box, so one interval per touch is exact.
    for_each_touch(slices, grid, [&](int64_t chunk, Slice part) {
        raw[cursor[chunk]++] = tighten(part) ? Interval{part.k_start, part.k_end} : Interval{};
    });

    ChunkNeeds needs;
    needs.first.reserve(num_chunks + 1);
    needs.first.push_back(0);
    Intervals own;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        own.assign(raw.begin() + place[chunk], raw.begin() + place[chunk + 1]);
        normalize(own);
        needs.intervals.insert(needs.intervals.end(), own.begin(), own.end());
        needs.first.push_back(static_cast<int64_t>(needs.intervals.size()));
    }
    return needs;
}

}  // namespace magi
