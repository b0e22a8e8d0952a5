// One backward kernel with its launcher; compiled once per variant with
//   -DMAGI_VARIANT_DTYPE=bf16|fp16 -DMAGI_VARIANT_HEAD_DIM=64|128 -DMAGI_VARIANT_SOFTCAP=0|1
#include "attention/sm90/backward.cuh"
#include "attention/sm90/host.h"
#include "attention/sm90/stats.h"
#include "attention/sm90/variant.h"

namespace magi {

int MAGI_VARIANT_NAME(backward)(const BackwardArgs& args, cudaStream_t stream) {
    using Traits = sm90::BackwardTraits<VariantElement, MAGI_VARIANT_HEAD_DIM, MAGI_VARIANT_SOFTCAP != 0>;
    const AttentionShape& shape = args.shape;
    constexpr int kDim = Traits::kDim;
    const int32_t group = shape.num_heads_q / shape.num_heads_kv;
    sm90::BackwardParams params{};
    params.work = args.work;
    params.total_q = shape.total_q;
    params.total_k = shape.total_k;
    params.num_heads_kv = shape.num_heads_kv;
    params.heads_per_group = group;
    constexpr float kLog2e = 1.4426950408889634f;
    const float scale = std::max(shape.softmax_scale, 1e-30f);  // as in the forward
    params.scale = scale;
    params.scale_log2 = (Traits::kSoftcap ? shape.softcap : scale) * kLog2e;
    params.scale_softcap = Traits::kSoftcap ? scale / shape.softcap : 0;
    params.dk = args.dk;
    params.dv = args.dv;
    params.dkv_is_fp32 = args.dkv_dtype == Dtype::fp32;
    params.accumulate_dkv = args.accumulate_dkv;
    params.wants_dq = args.work_dq.num_tiles == 0;
    // Queries, their gradients and dq of a group of heads.
    params.schedule = make_schedule(args.work, shape.num_heads_kv, 1, int64_t{8} * shape.total_q * kDim * group, args.counter);
    if (const int status = make_stats(args, stream); status != 0) return status;
    if (params.schedule.num_items == 0) return 0;

    // Without queries nothing is loaded; the maps still need some valid address.
    const bool has_queries = shape.total_q > 0;
    const TokenTensor dq{args.dq, int64_t{shape.num_heads_q} * kDim, kDim};
    if (encode_map(params.k, args.k, shape.dtype, shape.total_k, shape.num_heads_kv, kDim, Traits::kRows, Traits::kHalves)) return 1;
    if (encode_map(params.v, args.v, shape.dtype, shape.total_k, shape.num_heads_kv, kDim, Traits::kRows, Traits::kHalves)) return 1;
    if (has_queries) {
        if (encode_map(params.q, args.q, shape.dtype, shape.total_q, shape.num_heads_q, kDim, Traits::kCols, Traits::kHalves)) return 1;
        if (encode_map(params.dout, args.dout, shape.dtype, shape.total_q, shape.num_heads_q, kDim, Traits::kCols, Traits::kHalves))
            return 1;
        if (encode_map(params.dq, dq, Dtype::fp32, shape.total_q, shape.num_heads_q, kDim, 64, 2)) return 1;
        if (encode_planes_map(params.stats, args.stats, shape.total_q, stats_stride(shape.total_q), 2, shape.num_heads_q,
                              Traits::kStatsCols))
            return 1;
    }

    constexpr auto kKernel = sm90::backward_kernel<Traits>;
    constexpr int kShared = sizeof(sm90::BackwardShared<Traits>);
    static const cudaError_t prepared = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (prepared != cudaSuccess) return fail("backward kernel", prepared);
    if (const auto status = cudaMemsetAsync(args.counter, 0, sizeof(int32_t), stream); status != cudaSuccess)
        return fail("backward counter", status);
    const int grid = std::min(shape.num_sms, params.schedule.num_items);
    kKernel<<<grid, Traits::kThreads, kShared, stream>>>(params);
    if (const auto status = cudaGetLastError(); status != cudaSuccess) return fail("backward launch", status);
    return 0;
}

}  // namespace magi
