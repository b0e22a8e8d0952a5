// The table of operations that Python can run by name.
#pragma once

#include <string>

#include "base/arrays.h"

namespace magi {

using Operation = void (*)(const Arrays& inputs, Arrays& outputs);

// Throws InputError when the name is unknown.
Operation find_operation(const std::string& name);

// Each topic marshals its own operations.
void op_tighten(const Arrays& inputs, Arrays& outputs);
void op_canonical(const Arrays& inputs, Arrays& outputs);
void op_areas(const Arrays& inputs, Arrays& outputs);
void op_crop(const Arrays& inputs, Arrays& outputs);
void op_grid_area(const Arrays& inputs, Arrays& outputs);
void op_work_list(const Arrays& inputs, Arrays& outputs);
void op_tile_work(const Arrays& inputs, Arrays& outputs);
void op_plan_loads(const Arrays& inputs, Arrays& outputs);
void op_plan_rank(const Arrays& inputs, Arrays& outputs);
void op_wanted_exchange(const Arrays& inputs, Arrays& outputs);
void op_globalize(const Arrays& inputs, Arrays& outputs);
void op_seen_cells(const Arrays& inputs, Arrays& outputs);
void op_solve_dispatch(const Arrays& inputs, Arrays& outputs);
void op_dispatch_keys(const Arrays& inputs, Arrays& outputs);
void op_chunk_costs(const Arrays& inputs, Arrays& outputs);

}  // namespace magi
