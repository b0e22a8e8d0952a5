// What each step costs each rank, in pairs and rows: the input of the cost model. For all ranks, without any table of transfers.
// Plain C++20; knows nothing of machines or times.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "solver/steps.h"

namespace magi {

// [degree][cp_size], flat, step-major.
struct StepLoads {
    std::vector<int64_t> areas;           // visible pairs
    std::vector<int64_t> recv_rows;       // rows received from other ranks
    std::vector<int64_t> send_rows;       // rows sent to other ranks; a row sent to two ranks counts twice
    std::vector<int64_t> node_recv_rows;  // rows that enter the node through this rank (two-level form; empty on one node)
    std::vector<int64_t> node_send_rows;  // rows this rank sends to other nodes, once per node
};

std::vector<StepLoads> measure_steps(std::span<const Slice> slices, const Ownership& queries, const Ownership& keys, const Needs& needs,
                                     std::span<const StepSplit> splits, int64_t num_nodes);

// Rows each owner sends when every set of wanted tokens is sent once: counts[rank] summed over the sets.
std::vector<int64_t> count_sent_rows(std::vector<Intervals> wanted, const Ownership& keys);

}  // namespace magi
