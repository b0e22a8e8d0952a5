// The relay of a row is the rank of the destination node with the owner's index; knows nothing of link speeds.
#include "solver/hierarchy.h"

#include <algorithm>

namespace magi {

namespace {

// Where the tokens of each node's rank with our index lie in our relay buffer.
struct Relay {
    std::vector<RowIndex> tokens;     // per node
    std::vector<int32_t> first_rows;  // per node, in the relay buffer
};

Relay fill_relay(const Ownership& keys, const Intervals& entering, int32_t rank, int32_t node_size, ExchangeRuns& inter) {
    const auto num_nodes = static_cast<size_t>(keys.cp_size() / node_size);
    std::vector<Intervals> from(num_nodes);
    for (const Interval run : entering) {
        for_each_owned_part(run, keys, [&](Interval part, const OwnedRun& owned) {
            if (owned.owner % node_size == rank % node_size) from[static_cast<size_t>(owned.owner / node_size)].push_back(part);
        });
    }
    Relay relay;
    for (size_t node = 0; node < num_nodes; ++node) {
        relay.first_rows.push_back(inter.num_rows_out);
        relay.tokens.emplace_back(std::move(from[node]));
        const int32_t rows = relay.tokens.back().num_rows();
        if (rows > 0) inter.recv.add({static_cast<int32_t>(node), inter.num_rows_out, rows});
        inter.num_rows_out += rows;
    }
    return relay;
}

}  // namespace

TwoLevelExchange build_two_level_exchange(const Ownership& keys, const Needs& needs, const std::vector<Intervals>& nodes,
                                          const StepSplit& split, int32_t rank, int32_t step) {
    const int32_t node_size = keys.cp_size() / static_cast<int32_t>(nodes.size());
    TwoLevelExchange exchange;
    ExchangeRuns &inter = exchange.inter, &intra = exchange.intra;
    const RowIndex& own = keys.rows_of(rank);
    const int32_t our_node = rank / node_size, our_index = rank % node_size;
    inter.num_rows_in = own.num_rows();
    Relay relay;
    for (int32_t node = 0; node < static_cast<int32_t>(nodes.size()); ++node) {
        // All ranks of a node have the same window.
        const Intervals entering = clip(nodes[static_cast<size_t>(node)], split.window(node * node_size, step));
        if (node == our_node) {
            relay = fill_relay(keys, entering, rank, node_size, inter);
            continue;
        }
        for (const Interval run : entering)
            for_each_own_row_run(run, own, [&](int32_t row, int32_t rows) { inter.send.add({node, row, rows}); });
    }
    intra.num_rows_in = own.num_rows() + inter.num_rows_out;
    for (int32_t index = 0; index < node_size; ++index) {
        const int32_t receiver = our_node * node_size + index;
        int32_t arrived = 0;
        for (const Interval run : clip(needs.remote[static_cast<size_t>(receiver)].runs(), split.window(receiver, step))) {
            for_each_owned_part(run, keys, [&](Interval part, const OwnedRun& owned) {
                const int32_t rows = part.end - part.start;
                if (receiver == rank) intra.recv.add({owned.owner % node_size, arrived, rows});
                arrived += rows;
                if (owned.owner % node_size != our_index) return;
                const auto node = static_cast<size_t>(owned.owner / node_size);
                const int32_t row = owned.owner == rank
                                        ? owned.first_row + (part.start - owned.start)
                                        : own.num_rows() + relay.first_rows[node] + relay.tokens[node].rows_before(part.start);
                intra.send.add({index, row, rows});
            });
        }
        if (receiver == rank) intra.num_rows_out = arrived;
    }
    intra.recv.sort_by_peer();
    return exchange;
}

}  // namespace magi
