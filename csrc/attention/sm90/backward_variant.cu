// One backward kernel with its launcher; compiled once per variant with
//   -DMAGI_VARIANT_DTYPE=bf16|fp16 -DMAGI_VARIANT_HEAD_DIM=64|128 -DMAGI_VARIANT_SOFTCAP=0|1
// Three kernels: dk, dv and dq in one pass; and for the deterministic mode dk and dv alone, and dq alone.
#include "attention/sm90/backward.cuh"
#include "attention/sm90/dq.cuh"
#include "attention/sm90/host.h"
#include "attention/sm90/stats.h"
#include "attention/sm90/variant.h"

namespace magi {

namespace {

constexpr int kDim = MAGI_VARIANT_HEAD_DIM, kHalves = kDim / 64;
constexpr bool kSoftcap = MAGI_VARIANT_SOFTCAP != 0;
constexpr float kLog2e = 1.4426950408889634f;

// Scales and tensor maps that both passes know by the same names.
template <class Params>
void set_scales(Params& params, const AttentionShape& shape) {
    const float scale = least_scale(shape);
    params.scale = scale;
    params.scale_log2 = (kSoftcap ? shape.softcap : scale) * kLog2e;
    params.scale_softcap = kSoftcap ? scale / shape.softcap : 0;
}

// Boxes of q_rows queries and k_rows keys. Without queries (or keys) nothing of them is loaded.
template <class Params>
int set_maps(Params& params, const BackwardArgs& args, int32_t q_rows, int32_t k_rows) {
    const AttentionShape& shape = args.shape;
    const auto queries = [&](CUtensorMap& map, const TokenTensor& from) {
        return shape.total_q == 0 ? 0 : encode_map(map, from, shape.dtype, shape.total_q, shape.num_heads_q, kDim, q_rows, kHalves);
    };
    const auto keys = [&](CUtensorMap& map, const TokenTensor& from) {
        return shape.total_k == 0 ? 0 : encode_map(map, from, shape.dtype, shape.total_k, shape.num_heads_kv, kDim, k_rows, kHalves);
    };
    return queries(params.q, args.q) || queries(params.dout, args.dout) || keys(params.k, args.k) || keys(params.v, args.v);
}

template <auto kKernel, class Params>
int launch(int threads, int shared, const Params& params, const BackwardArgs& args, cudaStream_t stream) {
    if (params.schedule.num_items == 0) return 0;
    if (const auto status = allow_shared<kKernel>(shared); status != cudaSuccess) return fail("backward kernel", status);
    if (const auto status = cudaMemsetAsync(args.counter, 0, sizeof(int32_t), stream); status != cudaSuccess)
        return fail("backward counter", status);
    const dim3 grid(static_cast<unsigned>(std::min(args.shape.num_sms, params.schedule.num_items)));
    const auto status = start(kKernel, grid, threads, static_cast<size_t>(shared), stream, params);
    return status == cudaSuccess ? 0 : fail("backward launch", status);
}

template <bool kWantsDq>
int launch_dkv(const BackwardArgs& args, cudaStream_t stream) {
    using Traits = sm90::BackwardTraits<VariantElement, kDim, kSoftcap, kWantsDq>;
    const AttentionShape& shape = args.shape;
    sm90::BackwardParams params{};
    set_scales(params, shape);
    if (set_maps(params, args, Traits::kCols, Traits::kRows)) return 1;
    params.work = args.work;
    params.total_q = shape.total_q;
    params.total_k = shape.total_k;
    params.num_heads_kv = shape.num_heads_kv;
    params.head_splits = args.head_splits;
    params.heads_per_item = shape.num_heads_q / shape.num_heads_kv / args.head_splits;
    params.dk = args.dk;
    params.dv = args.dv;
    params.dkv_is_fp32 = args.dkv_dtype == Dtype::fp32;
    params.accumulate_dkv = args.accumulate_dkv;
    // CTAs of a kv head walk its query heads in the same order: queries, their gradients and dq of one are in use at a time. More groups
    // at once balance better, but cost more in the cache.
    params.schedule = make_schedule(args.work, shape.num_heads_kv * args.head_splits, args.head_splits,
                                    int64_t{8} * args.head_splits * shape.total_q * kDim, shape.num_sms, 1, args.counter);
    if (shape.total_q > 0) {
        const TokenTensor dq{args.dq, int64_t{shape.num_heads_q} * kDim, kDim};
        if (encode_map(params.dq, dq, Dtype::fp32, shape.total_q, shape.num_heads_q, kDim, 64, Traits::kDqCols / 32)) return 1;
        if (encode_planes_map(params.stats, args.stats, shape.total_q, stats_stride(shape.total_q), 2, shape.num_heads_q,
                              Traits::kStatsCols))
            return 1;
    }
    return launch<sm90::backward_kernel<Traits>>(Traits::kThreads, sizeof(sm90::BackwardShared<Traits>), params, args, stream);
}

int launch_dq(const BackwardArgs& args, cudaStream_t stream) {
    using Traits = sm90::DqTraits<VariantElement, kDim, kSoftcap>;
    const AttentionShape& shape = args.shape;
    sm90::DqParams params{};
    set_scales(params, shape);
    if (set_maps(params, args, Traits::kRows, Traits::kCols)) return 1;
    params.work = args.work_dq;
    params.total_q = shape.total_q;
    params.total_k = shape.total_k;
    params.num_heads_q = shape.num_heads_q;
    params.heads_per_group = shape.num_heads_q / shape.num_heads_kv;
    params.stats = args.stats;
    params.stats_stride = stats_stride(shape.total_q);
    params.dq = args.dq;
    params.schedule = make_schedule(args.work_dq, shape.num_heads_q, params.heads_per_group, int64_t{4} * shape.total_k * kDim,
                                    shape.num_sms, 8, args.counter);
    return launch<sm90::dq_kernel<Traits>>(Traits::kThreads, sizeof(sm90::DqShared<Traits>), params, args, stream);
}

}  // namespace

int MAGI_VARIANT_NAME(backward)(const BackwardArgs& args, cudaStream_t stream) {
    if (!is_made_for(args.work, sm90::kBackwardTileRows, sm90::kBackwardBlockCols)) return refuse(args.work, "backward");
    if (args.work_dq.num_tiles != 0 && !is_made_for(args.work_dq, sm90::kDqTileRows, sm90::kDqBlockCols)) return refuse(args.work_dq, "dq");
    if (const int status = make_stats(args, stream); status != 0) return status;
    if (args.work_dq.num_tiles == 0) return launch_dkv<true>(args, stream);
    if (const int status = launch_dkv<false>(args, stream); status != 0) return status;
    return launch_dq(args, stream);
}

}  // namespace magi
