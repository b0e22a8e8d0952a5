// Which work item (tile, head) a CTA takes next: heaviest tiles first, heads that share keys side by side. Knows nothing of what is
// computed.
#pragma once

#include <cstdint>

#include "attention/work.h"

namespace magi {

// Items run section by section: as many groups of heads together as keep their keys and values in the L2 cache; inside a section
// tiles by falling cost; inside a tile all heads of the section, so that heads of one group read the same keys at the same time.
struct Schedule {
    int32_t num_heads;          // heads that items are made of
    int32_t heads_per_section;  // a multiple of the heads that share keys
    int32_t num_items;          // num_tiles * num_heads
    int32_t* counter;           // items taken beyond the first one of every CTA, starts at 0
};

struct Item {
    int32_t tile, head;
};

__device__ __forceinline__ Item item_at(const Schedule& schedule, const Work& work, int32_t index) {
    const int32_t full = work.num_tiles * schedule.heads_per_section;
    const int32_t section = index / full;
    const int32_t first_head = section * schedule.heads_per_section;
    const int32_t heads = min(schedule.heads_per_section, schedule.num_heads - first_head);
    const int32_t within = index - section * full;
    const int32_t rank = within / heads;
    return {__ldg(work.order + rank), first_head + within - rank * heads};
}

}  // namespace magi
