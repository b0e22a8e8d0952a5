// The two-level form of one step's exchange: a row crosses to each node that needs it once, then fans out inside the node.
// Plain C++20; knows nothing of transports.
#pragma once

#include "solver/exchange.h"

namespace magi {

// rank = node * node_size + index. `inter` has nodes as peers (ranks with our index) and fills the relay buffer, ordered by (node, token).
// `intra` has indices in our node as peers; its source is [local rows, relay buffer] and it fills the receive buffer.
struct TwoLevelExchange {
    ExchangeRuns inter, intra;
};

// nodes: keys_entering_nodes.
TwoLevelExchange build_two_level_exchange(const Ownership& keys, const Needs& needs, const std::vector<Intervals>& nodes,
                                          const StepSplit& split, int32_t rank, int32_t step);

}  // namespace magi
