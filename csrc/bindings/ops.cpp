// A table of contents: every operation by name.
#include "bindings/ops.h"

#include <algorithm>
#include <array>
#include <utility>

namespace magi {

namespace {

constexpr std::array kOperations = {
    std::pair<const char*, Operation>{"tighten", op_tighten},
    std::pair<const char*, Operation>{"canonical", op_canonical},
    std::pair<const char*, Operation>{"areas", op_areas},
    std::pair<const char*, Operation>{"crop", op_crop},
    std::pair<const char*, Operation>{"grid_area", op_grid_area},
    std::pair<const char*, Operation>{"work_list", op_work_list},
    std::pair<const char*, Operation>{"tile_work", op_tile_work},
    std::pair<const char*, Operation>{"plan_loads", op_plan_loads},
    std::pair<const char*, Operation>{"plan_rank", op_plan_rank},
    std::pair<const char*, Operation>{"wanted_exchange", op_wanted_exchange},
    std::pair<const char*, Operation>{"globalize", op_globalize},
    std::pair<const char*, Operation>{"seen_cells", op_seen_cells},
    std::pair<const char*, Operation>{"solve_dispatch", op_solve_dispatch},
    std::pair<const char*, Operation>{"dispatch_keys", op_dispatch_keys},
    std::pair<const char*, Operation>{"chunk_costs", op_chunk_costs},
};

}  // namespace

Operation find_operation(const std::string& name) {
    for (const auto& [known, operation] : kOperations)
        if (name == known) return operation;
    throw InputError("unknown operation '" + name + "'");
}

}  // namespace magi
