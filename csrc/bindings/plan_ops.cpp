// Plan operations: arrays in, arrays out. Marshalling only.
#include <string>

#include "base/slice.h"
#include "bindings/flatten.h"
#include "bindings/ops.h"

#include "solver/exchange.h"
#include "solver/fitted_tiles.h"
#include "solver/hierarchy.h"
#include "solver/local_slices.h"
#include "solver/rebuild.h"
#include "solver/step_loads.h"
#include "solver/tile_work.h"
#include "solver/work_list.h"

namespace magi {

namespace {

// "<side>_owner" int32 [num_chunks], "<side>_chunk_size", "<side>_total", "cp_size".
Ownership read_ownership(const Arrays& inputs, const std::string& side) {
    return {inputs.view<int32_t>(side + "_owner"), inputs.scalar(side + "_chunk_size"), inputs.scalar(side + "_total"),
            inputs.scalar("cp_size")};
}

StepRule read_rule(const Arrays& inputs) {
    return {inputs.scalar("num_nodes"),    inputs.scalar("min_rows"),    inputs.scalar("is_greedy") != 0,
            inputs.scalar("pair_cost_fs"), inputs.scalar("row_cost_fs"), inputs.scalar("start_cost_fs")};
}

// int32 [n, 2] half-open ranges.
Intervals read_intervals(const Arrays& inputs, const std::string& name) {
    const auto values = inputs.view<int32_t>(name);
    if (values.size() % 2 != 0) throw InputError("array '" + name + "' must have pairs");
    Intervals intervals(values.size() / 2);
    for (size_t idx = 0; idx < intervals.size(); ++idx) intervals[idx] = {values[2 * idx], values[2 * idx + 1]};
    return intervals;
}

int32_t read_rank(const Arrays& inputs, const Ownership& keys) {
    const int64_t rank = inputs.scalar("cp_rank");
    if (rank < 0 || rank >= keys.cp_size())
        throw InputError("cp_rank=" + std::to_string(rank) + " is not a rank below " + std::to_string(keys.cp_size()));
    return static_cast<int32_t>(rank);
}

void set_exchange(Arrays& outputs, const std::string& prefix, const ExchangeRuns& exchange) {
    outputs.set(prefix + "send", flatten(exchange.send.runs()));
    outputs.set(prefix + "recv", flatten(exchange.recv.runs()));
    outputs.set(prefix + "rows", std::vector<int64_t>{exchange.num_rows_in, exchange.num_rows_out});
}

void set_step_keys(Arrays& outputs, const std::string& prefix, std::span<const Slice> slices, const RowIndex& queries,
                   const RowIndex& keys) {
    const std::vector<Slice> local = build_local_slices(slices, queries, keys);
    int64_t pairs = 0;
    for (const Slice& s : local) pairs += area(s);
    outputs.set(prefix + "k_runs", flatten(keys.runs()));
    outputs.set(prefix + "slices", flatten(local));
    outputs.set(prefix + "area", pairs);
}

}  // namespace

// slices int32 [N, 6], total_q, tile_m -> tile_offsets int32 [num_tiles + 1], pieces int32 [P, 6].
void op_work_list(const Arrays& inputs, Arrays& outputs) {
    WorkList list = build_work_list(inputs.view<Slice>("slices"), inputs.scalar("total_q"), inputs.scalar("tile_m"));
    outputs.set("tile_offsets", std::move(list.tile_offsets));
    outputs.set("pieces", flatten(list.pieces));
}

// slices int32 [N, 6], num_rows, tile_rows, block_cols, transposed (0 or 1), fitted (0 or 1) -> packed int32 (PackedTileWork), costs int32
// [num_tiles], layout int64: num_tiles, offset_order, offset_segment_offsets, offset_near_order and offset_cuts (-1 without),
// offset_segments, offset_pieces, num_segments, num_pieces.
void op_tile_work(const Arrays& inputs, Arrays& outputs) {
    const int64_t num_rows = inputs.scalar("num_rows");
    const TileShape shape{inputs.scalar("tile_rows"), inputs.scalar("block_cols")};
    const auto slices = inputs.view<Slice>("slices");
    const bool is_transposed = inputs.scalar("transposed") != 0, is_fitted = inputs.scalar("fitted") != 0;
    TileWork work =
        is_fitted ? build_fitted_work(slices, num_rows, shape, is_transposed) : build_tile_work(slices, num_rows, shape, is_transposed);
    PackedTileWork packed = pack(work);
    const auto num_segments = static_cast<int64_t>(work.segments.size()), num_pieces = static_cast<int64_t>(work.pieces.size());
    outputs.set("layout", std::vector<int64_t>{static_cast<int64_t>(work.order.size()), packed.offset_order, packed.offset_segment_offsets,
                                               packed.offset_near_order, packed.offset_cuts, packed.offset_segments, packed.offset_pieces,
                                               num_segments, num_pieces});
    outputs.set("packed", std::move(packed.values));
    outputs.set("costs", std::move(work.costs));
}

// slices, q_* and k_* (read_ownership), the rule (read_rule), degrees int64 [K] -> areas, local_areas, recv_rows, send_rows int64 [R];
// step_degrees int64 [K]; per candidate <idx>: "<idx>_areas", ... int64 [degree, R] (StepLoads).
void op_plan_loads(const Arrays& inputs, Arrays& outputs) {
    const auto slices = inputs.view<Slice>("slices");
    const Ownership queries = read_ownership(inputs, "q"), keys = read_ownership(inputs, "k");
    const StepRule rule = read_rule(inputs);
    const Needs needs = compute_needs(slices, queries, keys);
    const std::vector<StepSplit> splits = split_steps(slices, queries, keys, needs, rule, inputs.view<int64_t>("degrees"));
    std::vector<StepLoads> loads = measure_steps(slices, queries, keys, needs, splits, rule.num_nodes);
    std::vector<int64_t> degrees, recv_rows;
    for (size_t idx = 0; idx < splits.size(); ++idx) {
        const std::string prefix = std::to_string(idx) + "_";
        degrees.push_back(splits[idx].degree());
        outputs.set(prefix + "areas", std::move(loads[idx].areas));
        outputs.set(prefix + "recv_rows", std::move(loads[idx].recv_rows));
        outputs.set(prefix + "send_rows", std::move(loads[idx].send_rows));
        outputs.set(prefix + "node_recv_rows", std::move(loads[idx].node_recv_rows));
        outputs.set(prefix + "node_send_rows", std::move(loads[idx].node_send_rows));
    }
    std::vector<Intervals> wanted;
    for (const RowIndex& remote : needs.remote) {
        recv_rows.push_back(remote.num_rows());
        wanted.push_back(remote.runs());
    }
    outputs.set("step_degrees", std::move(degrees));
    outputs.set("areas", needs.areas);
    outputs.set("local_areas", needs.local_areas);
    outputs.set("recv_rows", std::move(recv_rows));
    outputs.set("send_rows", count_sent_rows(std::move(wanted), keys));
}

// The same inputs with one degree and cp_rank -> degree; "0_*" the local step, "<s>_*" remote step s >= 1: k_runs int32 [n, 2],
// slices int32 [N, 6], area, and for remote steps send, recv int32 [n, 3], rows int64 [2] (in, out); with num_nodes > 1 also
// inter_* and intra_*.
void op_plan_rank(const Arrays& inputs, Arrays& outputs) {
    const auto slices = inputs.view<Slice>("slices");
    const Ownership queries = read_ownership(inputs, "q"), keys = read_ownership(inputs, "k");
    const StepRule rule = read_rule(inputs);
    const int32_t rank = read_rank(inputs, keys);
    const Needs needs = compute_needs(slices, queries, keys);
    const StepSplit split = split_steps(slices, queries, keys, needs, rule, inputs.view<int64_t>("degrees")).at(0);
    std::vector<Intervals> nodes;
    if (rule.num_nodes > 1) nodes = keys_entering_nodes(needs, keys, rule.num_nodes);
    const RowIndex& rows = queries.rows_of(rank);
    set_step_keys(outputs, "0_", slices, rows, keys.rows_of(rank));
    for (int32_t step = 0; step < split.degree(); ++step) {
        const std::string prefix = std::to_string(step + 1) + "_";
        const RowIndex remote(clip(needs.remote[static_cast<size_t>(rank)].runs(), split.window(rank, step)));
        set_step_keys(outputs, prefix, slices, rows, remote);
        set_exchange(outputs, prefix, build_step_exchange(keys, needs, split, rank, step));
        if (rule.num_nodes == 1) continue;
        const TwoLevelExchange exchange = build_two_level_exchange(keys, needs, nodes, split, rank, step);
        set_exchange(outputs, prefix + "inter_", exchange.inter);
        set_exchange(outputs, prefix + "intra_", exchange.intra);
    }
    outputs.set("degree", int64_t{split.degree()});
}

// wanted int32 [n, 2] of all ranks one after the other, wanted_ends int64 [R], k_* (read_ownership), cp_rank -> send, recv, rows.
void op_wanted_exchange(const Arrays& inputs, Arrays& outputs) {
    const Ownership keys = read_ownership(inputs, "k");
    const Intervals ranges = read_intervals(inputs, "wanted");
    const auto ends = inputs.view<int64_t>("wanted_ends");
    if (static_cast<int64_t>(ends.size()) != keys.cp_size())
        throw InputError("wanted has " + std::to_string(ends.size()) + " ranks; cp_size is " + std::to_string(keys.cp_size()));
    std::vector<std::span<const Interval>> wanted;
    int64_t start = 0;
    for (const int64_t end : ends) {
        if (end < start || end > static_cast<int64_t>(ranges.size())) throw InputError("wanted_ends must ascend inside wanted");
        wanted.push_back(std::span(ranges).subspan(static_cast<size_t>(start), static_cast<size_t>(end - start)));
        start = end;
    }
    set_exchange(outputs, "", build_wanted_exchange(keys, wanted, read_rank(inputs, keys)));
}

// Local slices int32 [N, 6], q_runs and k_runs int32 [n, 2] (tokens of the two buffers, in row order) -> fragments int32 [M, 6]: the same
// cells in global tokens, one fragment per pair of runs. The inverse of building local slices, for checks.
void op_globalize(const Arrays& inputs, Arrays& outputs) {
    const RowIndex queries(read_intervals(inputs, "q_runs")), keys(read_intervals(inputs, "k_runs"));
    outputs.set("fragments", flatten(globalize(inputs.view<Slice>("slices"), queries, keys)));
}

// Per fragment, all its cells and those that the mask has: fragments, slices int32 [n, 6] -> cells, seen int64 [n].
// Slices must be sorted by q_start.
void op_seen_cells(const Arrays& inputs, Arrays& outputs) {
    const auto fragments = inputs.view<Slice>("fragments");
    std::vector<int64_t> cells;
    for (const Slice& fragment : fragments) cells.push_back(area(fragment));
    outputs.set("cells", std::move(cells));
    outputs.set("seen", count_seen_cells(fragments, inputs.view<Slice>("slices")));
}

}  // namespace magi
