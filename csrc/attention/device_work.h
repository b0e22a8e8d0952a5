// C ABI of the device planner: tile work lists made on the GPU from range tensors whose content the host never sees.
// No CUDA, torch or Python header. Calls return at once, allocate nothing and never wait for the device; work is ordered on the stream.
//
// The workspace begins with the list, in the layout of csrc/solver/tile_work.h: [0] status, [1] num_segments, [2] num_pieces, [3] 0,
// then order, segment_offsets, segments, pieces at offsets that depend on sizes alone, so the host can launch attention with them at
// once. The segments of a tile and the pieces of a segment are those of the host planner, in the same order.
//
// When the status is not 0 the list is still safe to walk: nothing outside the tensors is named. But it is not the mask that was
// asked for, and the host does not know. A caller that does not wait
//   1. runs magi_ffa_poison on the outputs after attention: they become NaN on the device, so nothing wrong is computed with;
//   2. lets the same kernel write the reasons to words of pinned memory, and looks at these at its next convenient point (the next call,
//      the backward, a synchronisation of the user), where it raises an error. Nothing is copied, and a wrong list costs the host no more.
#pragma once

#include <cstdint>

#include "attention/launch.h"

namespace magi {

enum DeviceWorkStatus : int32_t {
    kListTooLong = 1,   // the list did not fit its workspace; every tile is empty. The host planner has no such limit
    kRangeOutside = 2,  // a range is reversed or reaches outside its tensor; the part inside was taken, nothing when reversed
    kUnknownType = 4,   // a type is not 0 to 3; its slice was left out
};

struct DeviceWorkArgs {
    int32_t total_q, total_k;
    int32_t tile_rows, block_cols;  // tile_rows up to 1024
    int32_t is_transposed;          // 1: tiles own keys, columns are queries
    int32_t range_bytes;            // 4 or 8: int32 or int64 ranges
    int32_t type_bytes;             // 4 or 8
    int32_t reserved;               // 0
    int64_t num_slices;             // up to 2^24; no cell may be covered twice, which is not checked
    const void* q_ranges;           // [num_slices, 2], contiguous, half-open
    const void* k_ranges;           // [num_slices, 2]
    const void* types;              // [num_slices] 0 full, 1 causal, 2 inv_causal, 3 bi_causal; null: all full
    const int32_t* slices;          // null, or [num_slices, 6] in place of the three above
    int32_t* workspace;             // as many int32 as the layout says, aligned to 16 bytes, need not be initialised
};

// What depends on sizes alone; pointers of the arguments are not read. In int32 elements.
struct DeviceWorkLayout {
    int64_t workspace_size;
    int64_t offset_order, offset_segment_offsets, offset_segments, offset_pieces;
    int64_t num_tiles, num_rows;
};

struct PoisonArgs {
    const int32_t* status;
    int32_t bits;         // poison when one of these is set
    int32_t num_buffers;  // up to 4
    void* data[4];        // floats of any format, aligned to 16 bytes
    int64_t num_bytes[4];
    int32_t* reports;  // null, or 3 words that the host reads: word n becomes 1 when bit n of the status is set, and is never cleared here
};

}  // namespace magi

// 0, or non-zero with the reason in magi_ffa_error() of the same thread.
MAGI_EXPORT int magi_ffa_device_work_layout(const magi::DeviceWorkArgs* args, magi::DeviceWorkLayout* layout);
MAGI_EXPORT int magi_ffa_device_work(const magi::DeviceWorkArgs* args, void* stream);
// Fills the buffers with NaN when the status says so.
MAGI_EXPORT int magi_ffa_poison(const magi::PoisonArgs* args, void* stream);
