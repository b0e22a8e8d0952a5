// Layouts that ignore the mask: contiguous and zigzag runs of chunks. Knows nothing of areas.
#include "solver/dispatch.h"

namespace magi {

Owners contiguous_owners(const DispatchDesc& desc) {
    const int64_t n = desc.num_chunks();
    Owners owner(n);
    for (int64_t rank = 0; rank < desc.cp_size; ++rank)
        std::fill(owner.begin() + n * rank / desc.cp_size, owner.begin() + n * (rank + 1) / desc.cp_size, static_cast<int32_t>(rank));
    return owner;
}

Owners zigzag_owners(const DispatchDesc& desc) {
    const int64_t n = desc.num_chunks(), ranks = desc.cp_size, runs = 2 * ranks;
    // With equal chunk counts per rank the front run is the same length on every rank, and so is the back run.
    const int64_t front = n / ranks / 2, back = n / ranks - front;
    Owners owner(n);
    int64_t start = 0;
    for (int64_t run = 0; run < runs; ++run) {
        const int64_t end = desc.is_even ? start + (run < ranks ? front : back) : n * (run + 1) / runs;
        const int64_t rank = run < ranks ? run : runs - 1 - run;
        std::fill(owner.begin() + start, owner.begin() + end, static_cast<int32_t>(rank));
        start = end;
    }
    return owner;
}

}  // namespace magi
