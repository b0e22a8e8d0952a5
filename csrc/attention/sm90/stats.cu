// delta = rowsum(dout * out) - dlse and lse in base 2, transposed to head-major. One CTA takes 64 queries of one head.
#include "attention/sm90/stats.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/sm90/host.h"

namespace magi {

namespace {

constexpr int kTokens = 64, kThreads = 256;

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }

struct StatsParams {
    TokenTensor dout;
    const void* out;
    const float *lse, *dlse;
    float *delta, *stats;
    int64_t stride;
    int32_t total_q, num_heads, head_dim;
};

// Eight threads share a row: 16 or 32 bytes each and step.
template <class T, class Out>
__device__ __forceinline__ float row_product(const StatsParams& params, int64_t token, int head, int part) {
    const T* dout = static_cast<const T*>(params.dout.data) + token * params.dout.token_stride + head * params.dout.head_stride;
    const Out* out = static_cast<const Out*>(params.out) + (token * params.num_heads + head) * params.head_dim;
    float sum = 0;
    for (int at = 8 * part; at < params.head_dim; at += 64) {
        alignas(16) T grads[8];
        alignas(16) Out values[8];
        *reinterpret_cast<int4*>(grads) = __ldg(reinterpret_cast<const int4*>(dout + at));
#pragma unroll
        for (int chunk = 0; chunk < static_cast<int>(sizeof(Out)) / 2; ++chunk)
            reinterpret_cast<int4*>(values)[chunk] = __ldg(reinterpret_cast<const int4*>(out + at) + chunk);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float value = to_float(values[i]);
            sum += value == 0 ? 0.0f : value * to_float(grads[i]);
        }
    }
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
}

template <class T, class Out>
__global__ void __launch_bounds__(kThreads) stats_kernel(const StatsParams params) {
    constexpr float kLog2e = 1.4426950408889634f;
    const int head = blockIdx.y, part = threadIdx.x % 8;
    for (int row = threadIdx.x / 8; row < kTokens; row += kThreads / 8) {
        const int64_t token = int64_t{blockIdx.x} * kTokens + row;
        const bool exists = token < params.total_q;
        const int64_t at = token * params.num_heads + head;
        float delta = 0;
        if (params.out != nullptr) {
            delta = row_product<T, Out>(params, exists ? token : 0, head, part);
            if (exists && params.dlse != nullptr) delta -= params.dlse[at];
            if (exists && part == 0) params.delta[at] = delta;
        } else if (exists) {
            delta = params.delta[at];
        }
        if (!exists || part != 0) continue;
        const float lse = params.lse[at];
        float* to = params.stats + 2 * head * params.stride + token;
        to[0] = lse == -INFINITY ? 0.0f : lse * kLog2e;  // a row that sees nothing is hidden everywhere
        to[params.stride] = delta;
    }
}

template <class T>
cudaError_t launch(const StatsParams& params, bool out_is_fp32, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>((params.total_q + kTokens - 1) / kTokens), static_cast<unsigned>(params.num_heads));
    if (out_is_fp32) return start(stats_kernel<T, float>, grid, kThreads, 0, stream, params);
    return start(stats_kernel<T, T>, grid, kThreads, 0, stream, params);
}

}  // namespace

int make_stats(const BackwardArgs& args, cudaStream_t stream) {
    const AttentionShape& shape = args.shape;
    if (shape.total_q == 0) return 0;
    const StatsParams params{
        args.dout,     args.out,          args.lse,      args.dlse, args.delta, args.stats, stats_stride(shape.total_q),
        shape.total_q, shape.num_heads_q, shape.head_dim};
    const bool out_is_fp32 = args.out_dtype == Dtype::fp32;
    const cudaError_t status =
        shape.dtype == Dtype::bf16 ? launch<__nv_bfloat16>(params, out_is_fp32, stream) : launch<__half>(params, out_is_fp32, stream);
    return status == cudaSuccess ? 0 : fail("backward statistics", status);
}

}  // namespace magi

MAGI_EXPORT int64_t magi_ffa_stats_floats(int32_t total_q, int32_t num_heads_q) { return 2 * magi::stats_stride(total_q) * num_heads_q; }
