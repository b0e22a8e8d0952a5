// One forward kernel with its launcher; compiled once per variant with
//   -DMAGI_VARIANT_DTYPE=bf16|fp16 -DMAGI_VARIANT_HEAD_DIM=64|128 -DMAGI_VARIANT_SOFTCAP=0|1
#include "attention/sm90/forward.cuh"
#include "attention/sm90/host.h"
#include "attention/sm90/variant.h"

namespace magi {

namespace {

template <int kCols>
int launch(const ForwardArgs& args, cudaStream_t stream) {
    using Traits = sm90::ForwardTraits<VariantElement, MAGI_VARIANT_HEAD_DIM, MAGI_VARIANT_SOFTCAP != 0, kCols>;
    const AttentionShape& shape = args.shape;
    constexpr int kDim = Traits::kDim;
    const int32_t group = shape.num_heads_q / shape.num_heads_kv;
    sm90::ForwardParams params{};
    params.work = args.work;
    params.total_q = shape.total_q;
    params.total_k = shape.total_k;
    params.num_heads_q = shape.num_heads_q;
    params.heads_per_group = group;
    constexpr float kLog2e = 1.4426950408889634f;
    const float scale = least_scale(shape);
    params.scale_natural = Traits::kSoftcap ? shape.softcap : scale;
    params.scale_log2 = params.scale_natural * kLog2e;
    params.scale_softcap = Traits::kSoftcap ? scale / shape.softcap : 0;
    params.out_rows = args.out;
    params.out_is_fp32 = args.out_dtype == Dtype::fp32;
    params.accumulate = args.accumulate;
    params.lse = args.lse;
    params.sink_lse = args.sink_lse;
    params.sink_token_stride = args.sink_token_stride;
    params.max_logits = args.max_logits;
    params.schedule = make_schedule(args.work, shape.num_heads_q, group, int64_t{4} * shape.total_k * kDim, shape.num_sms, 8, args.counter);
    if (params.schedule.num_items == 0) return 0;

    // Without keys nothing is loaded; the maps still need some valid address.
    const bool has_keys = shape.total_k > 0;
    const TokenTensor& k = has_keys ? args.k : args.q;
    const TokenTensor& v = has_keys ? args.v : args.q;
    const int32_t num_keys = has_keys ? shape.total_k : shape.total_q;
    const int32_t key_heads = has_keys ? shape.num_heads_kv : shape.num_heads_q;
    const TokenTensor out{args.out, int64_t{shape.num_heads_q} * kDim, kDim};
    if (encode_map(params.q, args.q, shape.dtype, shape.total_q, shape.num_heads_q, kDim, Traits::kRows, Traits::kHalves)) return 1;
    if (encode_map(params.k, k, shape.dtype, num_keys, key_heads, kDim, Traits::kCols, Traits::kHalves)) return 1;
    if (encode_map(params.v, v, shape.dtype, num_keys, key_heads, kDim, Traits::kCols, Traits::kHalves)) return 1;
    if (!params.out_is_fp32 && encode_map(params.out, out, shape.dtype, shape.total_q, shape.num_heads_q, kDim, 64, Traits::kHalves))
        return 1;

    constexpr auto kKernel = sm90::forward_kernel<Traits>;
    constexpr int kShared = sizeof(sm90::ForwardShared<Traits>);
    if (const auto status = allow_shared<kKernel>(kShared); status != cudaSuccess) return fail("forward kernel", status);
    if (const auto status = cudaMemsetAsync(args.counter, 0, sizeof(int32_t), stream); status != cudaSuccess)
        return fail("forward counter", status);
    const int grid = std::min(shape.num_sms, params.schedule.num_items);
    const auto status = start(kKernel, dim3(static_cast<unsigned>(grid)), Traits::kThreads, kShared, stream, params);
    if (status != cudaSuccess) return fail("forward launch", status);
    return 0;
}

}  // namespace

int MAGI_VARIANT_NAME(forward)(const ForwardArgs& args, cudaStream_t stream) {
    if (is_made_for(args.work, sm90::kForwardTileRows, sm90::kForwardBlockCols)) return launch<sm90::kForwardBlockCols>(args, stream);
#if MAGI_VARIANT_HEAD_DIM == 128 && MAGI_VARIANT_SOFTCAP == 0  // tanh has no registers left beside 160 scores
    if (is_made_for(args.work, sm90::kForwardTileRows, sm90::kForwardWideCols)) return launch<sm90::kForwardWideCols>(args, stream);
#endif
    return refuse(args.work, "forward");
}

}  // namespace magi
