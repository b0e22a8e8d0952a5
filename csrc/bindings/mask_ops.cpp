// Mask operations: arrays in, arrays out.
#include "base/slice.h"
#include "bindings/ops.h"

namespace magi {

// slices int32 [N, 6] -> slices int32 [M, 6]: tightened, without empty ones, order kept.
void op_tighten(const Arrays& inputs, Arrays& outputs) {
    std::vector<int32_t> kept;
    for (Slice s : inputs.view<Slice>("slices")) {
        if (!tighten(s)) continue;
        kept.insert(kept.end(), {s.q_start, s.q_end, s.k_start, s.k_end, s.lo, s.hi});
    }
    outputs.set("slices", std::move(kept));
}

}  // namespace magi
