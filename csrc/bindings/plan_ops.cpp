// Plan operations: arrays in, arrays out. Marshalling only.
#include "base/slice.h"
#include "bindings/ops.h"
#include "solver/work_list.h"

namespace magi {

namespace {

std::vector<int32_t> flat(const std::vector<Slice>& slices) {
    std::vector<int32_t> values;
    values.reserve(slices.size() * 6);
    for (const Slice& s : slices) values.insert(values.end(), {s.q_start, s.q_end, s.k_start, s.k_end, s.lo, s.hi});
    return values;
}

}  // namespace

// slices int32 [N, 6], total_q, tile_m -> tile_offsets int32 [num_tiles + 1], pieces int32 [P, 6].
void op_work_list(const Arrays& inputs, Arrays& outputs) {
    WorkList list = build_work_list(inputs.view<Slice>("slices"), inputs.scalar("total_q"), inputs.scalar("tile_m"));
    outputs.set("tile_offsets", std::move(list.tile_offsets));
    outputs.set("pieces", flat(list.pieces));
}

}  // namespace magi
