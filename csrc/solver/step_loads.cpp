// Sums by sweeping over tokens; knows nothing of the order of rows in buffers.
#include "solver/step_loads.h"

#include <algorithm>
#include <utility>

namespace magi {

namespace {

// Remote area of each (step, rank) for every split, with one pass over the slices: windows between the cuts of all splits.
void fill_areas(std::span<const Slice> slices, const Ownership& queries, const Needs& needs, std::span<const StepSplit> splits,
                std::vector<StepLoads>& loads) {
    const auto cp_size = static_cast<int32_t>(needs.remote.size());
    std::vector<std::vector<int32_t>> cuts(needs.remote.size());
    for (int32_t rank = 0; rank < cp_size; ++rank) {
        std::vector<int32_t>& joined = cuts[static_cast<size_t>(rank)];
        for (const StepSplit& split : splits) joined.insert(joined.end(), split.cuts_of(rank).begin(), split.cuts_of(rank).end());
        std::sort(joined.begin(), joined.end());
        joined.erase(std::unique(joined.begin(), joined.end()), joined.end());
    }
    const auto areas = remote_areas(slices, queries, needs, cuts);
    for (size_t idx = 0; idx < splits.size(); ++idx) {
        for (int32_t step = 0; step < splits[idx].degree(); ++step) {
            for (int32_t rank = 0; rank < cp_size; ++rank) {
                const Interval window = splits[idx].window(rank, step);
                const std::vector<int32_t>& cut = cuts[static_cast<size_t>(rank)];
                int64_t pairs = 0;
                auto it = std::lower_bound(cut.begin(), cut.end(), window.start);
                for (; it != cut.end() && *it < window.end; ++it)
                    pairs += areas[static_cast<size_t>(rank)][static_cast<size_t>(it - cut.begin())];
                loads[idx].areas.push_back(pairs);
            }
        }
    }
}

void add_node_rows(const Ownership& keys, const std::vector<Intervals>& nodes, const StepSplit& split, int32_t step, StepLoads& loads) {
    const int32_t node_size = keys.cp_size() / static_cast<int32_t>(nodes.size());
    std::vector<Intervals> inside;
    std::vector<int64_t> entered(static_cast<size_t>(keys.cp_size()), 0);
    for (size_t node = 0; node < nodes.size(); ++node) {
        const auto first_rank = static_cast<int32_t>(node) * node_size;
        inside.push_back(clip(nodes[node], split.window(first_rank, step)));
        for (const Interval run : inside.back()) {
            for_each_owned_part(run, keys, [&](Interval rows, const OwnedRun& owned) {
                entered[static_cast<size_t>(first_rank + owned.owner % node_size)] += rows.end - rows.start;
            });
        }
    }
    loads.node_recv_rows.insert(loads.node_recv_rows.end(), entered.begin(), entered.end());
    const std::vector<int64_t> sent = count_sent_rows(std::move(inside), keys);
    loads.node_send_rows.insert(loads.node_send_rows.end(), sent.begin(), sent.end());
}

}  // namespace

std::vector<int64_t> count_sent_rows(std::vector<Intervals> wanted, const Ownership& keys) {
    // How many sets want a token changes only at the events; a sweep meets them together with the owners' runs.
    std::vector<std::pair<int32_t, int32_t>> events;
    for (const Intervals& intervals : wanted) {
        for (const Interval run : intervals) {
            events.emplace_back(run.start, 1);
            events.emplace_back(run.end, -1);
        }
    }
    std::sort(events.begin(), events.end());
    std::vector<int64_t> sent(static_cast<size_t>(keys.cp_size()), 0);
    size_t next = 0;
    int64_t count = 0;
    for (const OwnedRun& run : keys.runs()) {
        int32_t token = run.start;
        int64_t rows = 0;
        while (token < run.end) {
            for (; next < events.size() && events[next].first <= token; ++next) count += events[next].second;
            const int32_t until = next < events.size() ? std::min(run.end, events[next].first) : run.end;
            rows += count * (until - token);
            token = until;
        }
        sent[static_cast<size_t>(run.owner)] += rows;
    }
    return sent;
}

std::vector<StepLoads> measure_steps(std::span<const Slice> slices, const Ownership& queries, const Ownership& keys, const Needs& needs,
                                     std::span<const StepSplit> splits, int64_t num_nodes) {
    std::vector<StepLoads> loads(splits.size());
    fill_areas(slices, queries, needs, splits, loads);
    std::vector<Intervals> nodes;
    if (num_nodes > 1) nodes = keys_entering_nodes(needs, keys, num_nodes);
    for (size_t idx = 0; idx < splits.size(); ++idx) {
        for (int32_t step = 0; step < splits[idx].degree(); ++step) {
            std::vector<Intervals> wanted;
            for (int32_t rank = 0; rank < keys.cp_size(); ++rank) {
                wanted.push_back(clip(needs.remote[static_cast<size_t>(rank)].runs(), splits[idx].window(rank, step)));
                loads[idx].recv_rows.push_back(num_tokens(wanted.back()));
            }
            const std::vector<int64_t> sent = count_sent_rows(std::move(wanted), keys);
            loads[idx].send_rows.insert(loads[idx].send_rows.end(), sent.begin(), sent.end());
            if (num_nodes > 1) add_node_rows(keys, nodes, splits[idx], step, loads[idx]);
        }
    }
    return loads;
}

}  // namespace magi
