// The segments of one tile, made by a team of threads from the tile's pieces: the device's twin of csrc/solver/tile_work.cpp.
// Knows nothing of where pieces come from, of other tiles or of CUDA.
#pragma once

#include <cstdint>

#include "attention/tile_team.h"
#include "attention/work.h"
#include "base/slice.h"
#include "base/tile_cost.h"

namespace magi {

// Positions of pieces share a 64-bit sort key with column and row.
inline constexpr int32_t kMaxDeviceTileRows = 1 << 10;
inline constexpr int32_t kMaxDeviceSlices = 1 << 24;

// A tile with P pieces has at most 3 P edge segments (cuts where a piece begins or ends, and one more per interior segment) and P
// interior ones; no edge segment lists more than P pieces.
inline constexpr int32_t kMaxSegmentsPerPiece = 4;

// Memory of one tile, for `capacity` pieces.
struct TileScratch {
    static constexpr int64_t kIntsPerPiece = 22;

    // memory: kIntsPerPiece * capacity int32, aligned to 8 bytes; shared or global.
    MAGI_DEVICE TileScratch(int32_t* memory, int64_t capacity) {
        keys = reinterpret_cast<uint64_t*>(memory);
        events = keys + capacity;
        pieces = reinterpret_cast<Slice*>(events + 2 * capacity);
        counts = reinterpret_cast<int32_t*>(pieces + capacity);
        found = reinterpret_cast<Columns*>(counts + 2 * capacity);
        interior = reinterpret_cast<Columns*>(counts + 4 * capacity);
        reach = reinterpret_cast<int32_t*>(interior + capacity);
        block_begin = reach + capacity;
        run_begin = block_begin + capacity;
        run_end = run_begin + capacity;
        breaks = reinterpret_cast<int32_t*>(events);
    }

    Slice* pieces;         // in any order
    uint64_t* keys;        // (k_start, first row, position), sorted: sorted piece i is pieces[position]
    uint64_t* events;      // [2 capacity] (column, change of the number of rows that see it), sorted
    int32_t* breaks;       // [4 capacity] in place of the events: columns where segments may begin or end, sorted
    int32_t* counts;       // [4 capacity] pieces of the segment that begins at each break; before that rows after each event,
    Columns* found;        // [capacity]   and in its second half the columns that every row sees
    Columns* interior;     // interior segments
    int32_t* reach;        // largest k_end of the sorted pieces up to each
    int32_t* block_begin;  // column where the first block that sorted piece i touches begins; ascending
    int32_t* run_begin;    // columns of the runs
    int32_t* run_end;
};

struct TileTotals {
    int64_t num_edges = 0, num_interior = 0;  // segments
    int64_t num_pieces = 0;                   // of all edge segments together
    int64_t num_edge_blocks = 0, num_interior_blocks = 0;
};

// Use: the team fills scratch.pieces[0, num_pieces) with tight pieces of the tile, then measure(), then write() if it is wanted.
template <class Team>
class TileSegments {
public:
    // first_row, num_rows: of the tile that exist.
    MAGI_DEVICE TileSegments(Team& team, const TileScratch& scratch, int32_t num_pieces, int32_t first_row, int32_t num_rows,
                             int32_t block_cols)
        : team_(team), s_(scratch), num_pieces_(num_pieces), first_row_(first_row), num_rows_(num_rows), block_cols_(block_cols) {}

    MAGI_DEVICE TileTotals measure() {
        sort_pieces();
        find_runs();
        find_full_columns();
        find_interior();
        find_breaks();
        count_pieces();
        const int64_t edges = team_sum(team_, num_breaks_, [&](int32_t j) {
            return s_.counts[j] == 0 ? 0 : int64_t{1} + (int64_t{num_blocks(s_.breaks[j], s_.breaks[j + 1])} << 32);
        });
        totals_.num_edges = edges & INT32_MAX;
        totals_.num_edge_blocks = edges >> 32;
        totals_.num_pieces = team_sum(team_, num_breaks_, [&](int32_t j) { return int64_t{s_.counts[j]}; });
        return totals_;
    }

    // segments: num_edges + num_interior of them; pieces: the whole array, of which this tile has [piece_base, piece_base + num_pieces).
    // The totals must fit int32.
    MAGI_DEVICE void write(WorkSegment* segments, WorkPiece* pieces, int32_t piece_base) {
        const auto value = [&](int32_t j) { return s_.counts[j] == 0 ? 0 : int64_t{1} + (int64_t{s_.counts[j]} << 32); };
        team_scan(team_, num_breaks_, Sum{}, value, [&](int32_t j, int64_t before) {
            if (s_.counts[j] == 0) return;
            const int32_t begin = piece_base + static_cast<int32_t>(before >> 32);
            segments[before & INT32_MAX] = {s_.breaks[j], s_.breaks[j + 1], begin, begin + s_.counts[j]};
        });
        const auto num_edges = static_cast<int32_t>(totals_.num_edges);
        for (auto k = team_.rank(); k < static_cast<int32_t>(totals_.num_interior); k += team_.size())
            segments[num_edges + k] = {s_.interior[k].begin, s_.interior[k].end, 0, 0};
        for (int32_t idx = team_.rank() / team_.width(); idx < num_edges; idx += team_.size() / team_.width()) {
            const WorkSegment segment = segments[idx];
            WorkPiece* next = pieces + segment.piece_begin;
            for_touching(segment.col_begin, [&](int32_t i, bool touches, uint32_t votes) {
                if (touches) {
                    const Slice& p = piece(i);
                    next[count_bits(votes & ((1u << team_.lane()) - 1))] = {p.q_start, p.q_end, p.k_start, p.k_end, p.lo, p.hi};
                }
                next += count_bits(votes);
            });
        }
        team_.sync();
    }

private:
    static constexpr int32_t kPositionBits = 24, kRowBits = 10;
    static_assert(kMaxDeviceSlices <= 1 << kPositionBits && kMaxDeviceTileRows <= 1 << kRowBits && kMaxTokens < int64_t{1} << 30);

    MAGI_DEVICE const Slice& piece(int32_t i) const { return s_.pieces[s_.keys[i] & ((uint64_t{1} << kPositionBits) - 1)]; }
    MAGI_DEVICE int32_t num_blocks(int32_t begin, int32_t end) const { return (end - begin - 1) / block_cols_ + 1; }
    // The run that a covered column lies in.
    MAGI_DEVICE int32_t run_of(int32_t col) const {
        return first_past(num_runs_, [&](int32_t run) { return s_.run_begin[run] > col; }) - 1;
    }

    MAGI_DEVICE void sort_pieces() {
        for (int32_t i = team_.rank(); i < num_pieces_; i += team_.size()) {
            const Slice& p = s_.pieces[i];
            const auto row = static_cast<uint64_t>(p.q_start - first_row_);
            s_.keys[i] = static_cast<uint64_t>(p.k_start) << (kRowBits + kPositionBits) | row << kPositionBits | static_cast<uint64_t>(i);
        }
        team_.sync();
        team_sort(team_, s_.keys, num_pieces_);
    }

    MAGI_DEVICE bool starts_run(int32_t i) const { return i == 0 || piece(i).k_start > s_.reach[i - 1]; }

    MAGI_DEVICE void find_runs() {
        team_scan(
            team_, num_pieces_, Max{}, [&](int32_t i) { return int64_t{piece(i).k_end}; },
            [&](int32_t i, int64_t before) { s_.reach[i] = larger(static_cast<int32_t>(before), piece(i).k_end); });
        const int64_t num_runs = team_scan(
            team_, num_pieces_, Sum{}, [&](int32_t i) { return int64_t{starts_run(i)}; },
            [&](int32_t i, int64_t before) {
                const bool starts = starts_run(i);
                const auto run = static_cast<int32_t>(before) - (starts ? 0 : 1);
                if (starts) s_.run_begin[run] = piece(i).k_start;
                if (i + 1 == num_pieces_ || starts_run(i + 1)) s_.run_end[run] = s_.reach[i];
            });
        num_runs_ = static_cast<int32_t>(num_runs);
    }

    MAGI_DEVICE int32_t column_of(int32_t e) const { return static_cast<int32_t>(s_.events[e] >> 32); }
    MAGI_DEVICE bool is_last_of_column(int32_t e) const { return e + 1 == 2 * num_pieces_ || column_of(e + 1) != column_of(e); }
    // Every row sees the columns just before those of event e.
    MAGI_DEVICE bool was_full(int32_t e) const {
        int32_t other = e - 1;
        while (other >= 0 && column_of(other) == column_of(e)) --other;
        return other >= 0 && s_.counts[other] >= num_rows_;
    }

    // 1: full columns begin at event e; 1 << 32: they end there.
    MAGI_DEVICE int64_t full_edge(int32_t e) const {
        if (!is_last_of_column(e)) return 0;
        const bool is_full = s_.counts[e] >= num_rows_;
        if (is_full == was_full(e)) return 0;
        return is_full ? int64_t{1} : int64_t{1} << 32;
    }

    // No cell is covered twice, so the rows that see a column can be summed over pieces.
    MAGI_DEVICE void find_full_columns() {
        for (int32_t i = team_.rank(); i < num_pieces_; i += team_.size()) {
            const Slice& p = s_.pieces[i];
            const Columns seen = columns_all_rows_see(p);
            const bool is_any = seen.begin < seen.end;
            const auto event = [is_any](int32_t col, int32_t rows) {
                return is_any ? static_cast<uint64_t>(col) << 32 | static_cast<uint32_t>(rows) : uint64_t{INT32_MAX} << 32;
            };
            s_.events[2 * i] = event(seen.begin, p.q_end - p.q_start);
            s_.events[2 * i + 1] = event(seen.end, p.q_start - p.q_end);
        }
        team_.sync();
        team_sort(team_, s_.events, 2 * num_pieces_);
        const auto change = [&](int32_t e) { return int64_t{static_cast<int32_t>(s_.events[e])}; };
        team_scan(team_, 2 * num_pieces_, Sum{}, change,
                  [&](int32_t e, int64_t before) { s_.counts[e] = static_cast<int32_t>(before + change(e)); });
        const int64_t edges = team_scan(
            team_, 2 * num_pieces_, Sum{}, [&](int32_t e) { return full_edge(e); },
            [&](int32_t e, int64_t before) {
                const int64_t edge = full_edge(e);
                if (edge == 1) s_.found[before & INT32_MAX].begin = column_of(e);
                if (edge > 1) s_.found[before >> 32].end = column_of(e);
            });
        num_found_ = static_cast<int32_t>(edges >> 32);
    }

    // The whole blocks inside full columns; the columns lie in one run, whose first column is where blocks are counted from.
    MAGI_DEVICE Columns whole_blocks(const Columns& full) const {
        const int32_t grid = s_.run_begin[run_of(full.begin)];
        const auto cols = static_cast<uint32_t>(block_cols_);  // unsigned 32 bits hold every sum; 64-bit divisions are calls
        const uint32_t begin = grid + (static_cast<uint32_t>(full.begin - grid) + cols - 1) / cols * cols;
        return {static_cast<int32_t>(smaller<uint32_t>(begin, INT32_MAX)), grid + (full.end - grid) / block_cols_ * block_cols_};
    }

    MAGI_DEVICE void find_interior() {
        const auto value = [&](int32_t k) {
            const Columns blocks = whole_blocks(s_.found[k]);
            return blocks.begin < blocks.end ? int64_t{1} + (int64_t{num_blocks(blocks.begin, blocks.end)} << 32) : 0;
        };
        const int64_t whole = team_scan(team_, num_found_, Sum{}, value, [&](int32_t k, int64_t before) {
            const Columns blocks = whole_blocks(s_.found[k]);
            if (blocks.begin < blocks.end) s_.interior[before & INT32_MAX] = blocks;
        });
        totals_.num_interior = whole & INT32_MAX;
        totals_.num_interior_blocks = whole >> 32;
    }

    // Pieces touch all or none of the blocks between two breaks, and all or none of these are interior.
    MAGI_DEVICE void find_breaks() {
        const auto num_interior = static_cast<int32_t>(totals_.num_interior);
        for (int32_t i = team_.rank(); i < num_pieces_; i += team_.size()) {
            const Slice& p = piece(i);
            const int32_t run = run_of(p.k_start), grid = s_.run_begin[run];
            s_.block_begin[i] = grid + (p.k_start - grid) / block_cols_ * block_cols_;
            const uint32_t end = grid + (static_cast<uint32_t>(p.k_end - 1 - grid) / block_cols_ + 1) * block_cols_;
            s_.breaks[2 * i] = s_.block_begin[i];
            s_.breaks[2 * i + 1] = static_cast<int32_t>(smaller<uint32_t>(end, s_.run_end[run]));
        }
        for (int32_t k = team_.rank(); k < num_interior; k += team_.size()) {
            s_.breaks[2 * (num_pieces_ + k)] = s_.interior[k].begin;
            s_.breaks[2 * (num_pieces_ + k) + 1] = s_.interior[k].end;
        }
        team_.sync();
        num_breaks_ = 2 * (num_pieces_ + num_interior);
        team_sort(team_, s_.breaks, num_breaks_);
    }

    MAGI_DEVICE bool is_edge(int32_t j) const {
        if (j + 1 >= num_breaks_ || s_.breaks[j] == s_.breaks[j + 1]) return false;
        const int32_t col = s_.breaks[j];
        if (col >= s_.run_end[run_of(col)]) return false;
        const int32_t past = first_past(static_cast<int32_t>(totals_.num_interior), [&](int32_t k) { return s_.interior[k].begin > col; });
        return past == 0 || s_.interior[past - 1].end <= col;
    }

    // Calls each(i, touches, votes) for a range of sorted pieces that has all which touch the block that begins at col.
    template <class Each>
    MAGI_DEVICE void for_touching(int32_t col, const Each& each) const {
        const int32_t begin = first_past(num_pieces_, [&](int32_t i) { return s_.reach[i] > col; });
        const int32_t end = first_past(num_pieces_, [&](int32_t i) { return s_.block_begin[i] > col; });
        for (int32_t base = begin; base < end; base += team_.width()) {
            const int32_t i = base + team_.lane();
            const bool touches = i < end && piece(i).k_end > col;
            each(i, touches, team_.ballot(touches));
        }
    }

    MAGI_DEVICE void count_pieces() {
        for (int32_t j = team_.rank() / team_.width(); j < num_breaks_; j += team_.size() / team_.width()) {
            int32_t count = 0;
            if (is_edge(j)) for_touching(s_.breaks[j], [&](int32_t, bool, uint32_t votes) { count += count_bits(votes); });
            if (team_.lane() == 0) s_.counts[j] = count;
        }
        team_.sync();
    }

    Team& team_;
    const TileScratch s_;
    const int32_t num_pieces_, first_row_, num_rows_, block_cols_;
    int32_t num_runs_ = 0, num_found_ = 0, num_breaks_ = 0;
    TileTotals totals_;
};

}  // namespace magi
