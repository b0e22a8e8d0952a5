// C ABI of the compiled attention kernels: pointers, sizes, strides and a stream in, a status out.
// No CUDA, torch or Python header. Every call returns at once; work is ordered on the stream.
#pragma once

#include <cstdint>

#include "attention/work.h"

#define MAGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace magi {

enum class Dtype : int32_t { bf16 = 0, fp16 = 1, fp32 = 2 };

// [tokens, heads, head_dim], last dimension contiguous; strides in elements, multiples of 8 for 16-bit types (TMA: 16 bytes).
struct TokenTensor {
    void* data;
    int64_t token_stride, head_stride;
};

struct AttentionShape {
    int32_t total_q, total_k;
    int32_t num_heads_q, num_heads_kv;
    int32_t head_dim;     // 64 or 128, also of v
    Dtype dtype;          // of q, k, v, dout
    float softmax_scale;  // >= 0
    float softcap;        // 0: off
    int32_t num_sms;      // CTAs of the persistent grid
};

struct ForwardArgs {
    AttentionShape shape;
    Work work;  // rows are queries, tiles as in magi_ffa_forward_tile or magi_ffa_forward_wide_tile
    TokenTensor q, k, v;
    void* out;                  // contiguous [total_q, num_heads_q, head_dim]
    Dtype out_dtype;            // dtype of the inputs, or fp32
    float* lse;                 // contiguous [total_q, num_heads_q], natural log
    const float* sink_lse;      // null, or logsumexp of the sinks: [num_heads_q], or [total_q, num_heads_q]
    int64_t sink_token_stride;  // 0, or num_heads_q
    float* max_logits;          // null, or [num_heads_q], raised to the largest visible score; the caller fills -inf
    int32_t accumulate;         // 1: out (fp32) and lse hold the attention of other keys; merge into them. sink_lse is then null
    int32_t* counter;           // one int32 of scratch, need not be initialised
};

struct BackwardArgs {
    AttentionShape shape;
    Work work;     // rows are keys, slices transposed, tile_rows/block_cols as in magi_ffa_backward_tile
    Work work_dq;  // deterministic: rows are queries, tiles as in magi_ffa_dq_tile; num_tiles 0 otherwise
    TokenTensor q, k, v, dout;
    const float* lse;   // contiguous [total_q, num_heads_q], of the whole attention
    float* delta;       // contiguous [total_q, num_heads_q], rowsum(dout * out) - dlse: read when out is null, else written
    const void* out;    // null, or contiguous [total_q, num_heads_q, head_dim]; a 0 in it adds 0 to delta even where dout is NaN
    Dtype out_dtype;    // dtype of the inputs, or fp32
    const float* dlse;  // null, or contiguous [total_q, num_heads_q]; read with out
    float* stats;       // scratch of magi_ffa_stats_floats(total_q, num_heads_q) floats, 16-byte aligned
    float* dq;          // contiguous fp32 [total_q, num_heads_q, head_dim], added to
    void* dk;           // contiguous [total_k, num_heads_kv, head_dim]
    void* dv;
    Dtype dkv_dtype;         // dtype of the inputs, or fp32
    int32_t accumulate_dkv;  // 1: dk, dv (fp32) are added to; 0: every row is written
    int32_t head_splits;     // parts that the query heads of a kv head are cut in, a divisor of them; more than 1 only with accumulate_dkv
    int32_t* counter;        // one int32 of scratch, need not be initialised
};

}  // namespace magi

// 0, or non-zero with the reason in magi_ffa_error() of the same thread.
MAGI_EXPORT int magi_ffa_forward(const magi::ForwardArgs* args, void* stream);
MAGI_EXPORT int magi_ffa_backward(const magi::BackwardArgs* args, void* stream);
MAGI_EXPORT const char* magi_ffa_error();
// Comma separated names of the kernels in this library: "forward:bf16:128:0,..." (direction, dtype, head_dim, softcap).
MAGI_EXPORT const char* magi_ffa_variants();
// Rows of a tile and columns of a block that the work list must be made for: pair[0] = tile_rows, pair[1] = block_cols.
MAGI_EXPORT int magi_ffa_forward_tile(int32_t head_dim, int32_t pair[2]);
// The same for the kernel with wider blocks: pair[1] = 0 where there is none for this head_dim; not for softcap.
MAGI_EXPORT int magi_ffa_forward_wide_tile(int32_t head_dim, int32_t pair[2]);
MAGI_EXPORT int magi_ffa_backward_tile(int32_t head_dim, int32_t pair[2]);
MAGI_EXPORT int magi_ffa_dq_tile(int32_t head_dim, int32_t pair[2]);
MAGI_EXPORT int64_t magi_ffa_stats_floats(int32_t total_q, int32_t num_heads_q);
