// The exported calls: checks what no kernel checks, picks the variant, and names what is compiled when there is none.
#include "attention/launch.h"

#include <cuda_runtime.h>

#include <string>

#include "attention/sm90/host.h"
#include "attention/sm90/tiles.h"

// magi_variants.inc is written by the build: one MAGI_VARIANT(direction, dtype, head_dim, softcap) per kernel in this library.
namespace magi {

#define MAGI_IN_forward(dtype, head_dim, softcap) int forward_##dtype##_d##head_dim##_cap##softcap(const ForwardArgs&, cudaStream_t);
#define MAGI_IN_backward(dtype, head_dim, softcap) int backward_##dtype##_d##head_dim##_cap##softcap(const BackwardArgs&, cudaStream_t);
#define MAGI_VARIANT(direction, dtype, head_dim, softcap) MAGI_IN_##direction(dtype, head_dim, softcap)
#include "magi_variants.inc"
#undef MAGI_IN_forward
#undef MAGI_IN_backward

namespace {

template <class Args>
struct Variant {
    Dtype dtype;
    int32_t head_dim, softcap;
    int (*launch)(const Args&, cudaStream_t);
};

#define MAGI_IN_forward(dtype, head_dim, softcap) {Dtype::dtype, head_dim, softcap, forward_##dtype##_d##head_dim##_cap##softcap},
#define MAGI_IN_backward(dtype, head_dim, softcap)
constexpr Variant<ForwardArgs> kForward[] = {
#include "magi_variants.inc"
    {Dtype::fp32, 0, 0, nullptr}};
#undef MAGI_IN_forward
#undef MAGI_IN_backward

#define MAGI_IN_forward(dtype, head_dim, softcap)
#define MAGI_IN_backward(dtype, head_dim, softcap) {Dtype::dtype, head_dim, softcap, backward_##dtype##_d##head_dim##_cap##softcap},
constexpr Variant<BackwardArgs> kBackward[] = {
#include "magi_variants.inc"
    {Dtype::fp32, 0, 0, nullptr}};
#undef MAGI_IN_forward
#undef MAGI_IN_backward
#undef MAGI_VARIANT

#define MAGI_VARIANT(direction, dtype, head_dim, softcap) #direction ":" #dtype ":" #head_dim ":" #softcap ","
constexpr char kCompiled[] =
#include "magi_variants.inc"
    "";
#undef MAGI_VARIANT

template <class Args, int kCount>
int launch(const Variant<Args> (&variants)[kCount], const Args* args, void* stream, const char* direction) {
    const AttentionShape& shape = args->shape;
    if (shape.num_heads_kv < 1 || shape.num_heads_q < 1 || shape.num_heads_q % shape.num_heads_kv)
        return fail("num_heads_q=" + std::to_string(shape.num_heads_q) +
                    " must be a positive multiple of num_heads_kv=" + std::to_string(shape.num_heads_kv));
    if (shape.total_q < 0 || shape.total_k < 0 || shape.num_sms < 1)
        return fail("total_q and total_k must be at least 0, num_sms at least 1");
    if (!(shape.softmax_scale >= 0) || !(shape.softcap >= 0)) return fail("softmax_scale and softcap must be at least 0");
    for (const Variant<Args>& variant : variants)
        if (variant.launch != nullptr && variant.dtype == shape.dtype && variant.head_dim == shape.head_dim &&
            variant.softcap == (shape.softcap > 0 ? 1 : 0))
            return variant.launch(*args, static_cast<cudaStream_t>(stream));
    return fail(std::string("no ") + direction + " kernel for dtype " + std::to_string(static_cast<int>(shape.dtype)) +
                " (0 bf16, 1 fp16), head_dim " + std::to_string(shape.head_dim) + (shape.softcap > 0 ? ", softcap" : "") +
                "; compiled: " + kCompiled);
}

int tile(int32_t rows, int32_t cols, int32_t head_dim, int32_t pair[2]) {
    if (head_dim != 64 && head_dim != 128) return fail("head_dim=" + std::to_string(head_dim) + " must be 64 or 128");
    pair[0] = rows;
    pair[1] = cols;
    return 0;
}

}  // namespace
}  // namespace magi

MAGI_EXPORT int magi_ffa_forward(const magi::ForwardArgs* args, void* stream) {
    return magi::launch(magi::kForward, args, stream, "forward");
}

MAGI_EXPORT int magi_ffa_backward(const magi::BackwardArgs* args, void* stream) {
    const int32_t group = args->shape.num_heads_kv < 1 ? 0 : args->shape.num_heads_q / args->shape.num_heads_kv;
    if (args->head_splits < 1 || (args->head_splits > 1 && (!args->accumulate_dkv || group % args->head_splits)))
        return magi::fail("head_splits=" + std::to_string(args->head_splits) +
                          " must be 1, or a divisor of the query heads of a key head and then dk, dv are added to");
    return magi::launch(magi::kBackward, args, stream, "backward");
}

MAGI_EXPORT const char* magi_ffa_variants() { return magi::kCompiled; }

MAGI_EXPORT int magi_ffa_forward_tile(int32_t head_dim, int32_t pair[2]) {
    return magi::tile(magi::sm90::kForwardTileRows, magi::sm90::kForwardBlockCols, head_dim, pair);
}

MAGI_EXPORT int magi_ffa_forward_wide_tile(int32_t head_dim, int32_t pair[2]) {
    return magi::tile(magi::sm90::kForwardTileRows, head_dim == 128 ? magi::sm90::kForwardWideCols : 0, head_dim, pair);
}

MAGI_EXPORT int magi_ffa_backward_tile(int32_t head_dim, int32_t pair[2]) {
    return magi::tile(magi::sm90::kBackwardTileRows, magi::sm90::kBackwardBlockCols, head_dim, pair);
}

MAGI_EXPORT int magi_ffa_dq_tile(int32_t head_dim, int32_t pair[2]) {
    return magi::tile(magi::sm90::kDqTileRows, magi::sm90::kDqBlockCols, head_dim, pair);
}
