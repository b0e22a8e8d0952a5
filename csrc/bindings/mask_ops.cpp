// Mask operations: arrays in, arrays out. Marshals only; the solver decides.
#include "base/slice.h"
#include "bindings/flatten.h"
#include "bindings/ops.h"
#include "solver/grid_area.h"
#include "solver/overlap.h"

namespace magi {

// slices int32 [N, 6] -> slices int32 [M, 6]: tightened, without empty ones, order kept.
void op_tighten(const Arrays& inputs, Arrays& outputs) {
    std::vector<Slice> kept;
    for (Slice s : inputs.view<Slice>("slices"))
        if (tighten(s)) kept.push_back(s);
    outputs.set("slices", flatten(kept));
}

// slices int32 [N, 6], check int64 -> slices int32 [M, 6] tightened and sorted, source int32 [M] (positions in the input),
// overlap int64 [3] (two positions in the input and the cells they share) or [0] when no cell is covered twice or check is 0.
void op_canonical(const Arrays& inputs, Arrays& outputs) {
    CanonicalSlices canonical = canonical_slices(inputs.view<Slice>("slices"));
    std::vector<int64_t> overlap;
    if (inputs.scalar("check") != 0) {
        if (const auto found = find_overlap(canonical.slices)) {
            const auto [low, high] = std::minmax(canonical.source[found->first], canonical.source[found->second]);
            overlap = {low, high, found->num_cells};
        }
    }
    outputs.set("slices", flatten(canonical.slices));
    outputs.set("source", std::move(canonical.source));
    outputs.set("overlap", std::move(overlap));
}

// slices int32 [N, 6] -> areas int64 [N], visible pairs of each.
void op_areas(const Arrays& inputs, Arrays& outputs) {
    const auto slices = inputs.view<Slice>("slices");
    std::vector<int64_t> areas;
    areas.reserve(slices.size());
    for (const Slice& s : slices) areas.push_back(area(s));
    outputs.set("areas", std::move(areas));
}

// slices int32 [N, 6], box int64 [4] (q_start, q_end, k_start, k_end) -> slices int32 [M, 6]: what lies in the box, tightened,
// in the box's own coordinates, order kept.
void op_crop(const Arrays& inputs, Arrays& outputs) {
    const auto box = inputs.view<int64_t>("box");
    if (box.size() != 4) throw InputError("'box' must be four numbers");
    std::vector<Slice> kept;
    for (const Slice& slice : inputs.view<Slice>("slices")) {
        Slice s = clip(slice, static_cast<int32_t>(box[0]), static_cast<int32_t>(box[1]), static_cast<int32_t>(box[2]),
                       static_cast<int32_t>(box[3]));
        if (tighten(s)) kept.push_back(move(s, -box[0], -box[2]));
    }
    outputs.set("slices", flatten(kept));
}

// slices int32 [N, 6], q_edges int32 [A + 1], k_edges int32 [B + 1] -> areas int64 [A * B], visible pairs per cell.
void op_grid_area(const Arrays& inputs, Arrays& outputs) {
    outputs.set("areas", grid_area(inputs.view<Slice>("slices"), inputs.view<int32_t>("q_edges"), inputs.view<int32_t>("k_edges")));
}

}  // namespace magi
