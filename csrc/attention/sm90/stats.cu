// delta = rowsum(dout * out) - dlse, and -lse and -delta transposed to head-major. One CTA takes 64 queries of one head.
#include "attention/sm90/stats.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/sm90/host.h"

namespace magi {

namespace {

constexpr int kTokens = 64, kThreads = 256;
constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }

struct StatsParams {
    TokenTensor dout;
    const void* out;
    const float *lse, *dlse;
    float *delta, *stats;
    int64_t stride;
    int32_t total_q, num_heads;
    float lse_scale;  // from lse to what is added to the scores
};

// Eight threads share a row: 16 or 32 bytes each and step.
template <int kDim, class T, class Out>
__device__ __forceinline__ float row_product(const StatsParams& params, int64_t token, int head, int part) {
    const T* dout = static_cast<const T*>(params.dout.data) + token * params.dout.token_stride + head * params.dout.head_stride;
    const Out* out = static_cast<const Out*>(params.out) + (token * params.num_heads + head) * kDim;
    float sum = 0;
#pragma unroll
    for (int at = 0; at < kDim; at += 64) {
        alignas(16) T grads[8];
        alignas(16) Out values[8];
        *reinterpret_cast<int4*>(grads) = __ldg(reinterpret_cast<const int4*>(dout + at + 8 * part));
#pragma unroll
        for (int chunk = 0; chunk < static_cast<int>(sizeof(Out)) / 2; ++chunk)
            reinterpret_cast<int4*>(values)[chunk] = __ldg(reinterpret_cast<const int4*>(out + at + 8 * part) + chunk);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float value = to_float(values[i]);
            sum += value == 0 ? 0.0f : value * to_float(grads[i]);
        }
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
}

// CTAs that follow each other take the heads of the same queries, which lie side by side.
template <int kDim, class T, class Out>
__global__ void __launch_bounds__(kThreads) stats_kernel(const StatsParams params) {
    const int head = static_cast<int>(blockIdx.x % params.num_heads), part = threadIdx.x % 8;
    const int64_t first = int64_t{blockIdx.x / params.num_heads} * kTokens + threadIdx.x / 8;
#pragma unroll
    for (int row = 0; row < kTokens; row += kThreads / 8) {
        const int64_t token = first + row;
        const bool exists = token < params.total_q;
        const int64_t at = token * params.num_heads + head;
        float delta = 0;
        if (params.out != nullptr) {
            delta = row_product<kDim, T, Out>(params, exists ? token : 0, head, part);
            if (exists && params.dlse != nullptr) delta -= params.dlse[at];
            if (exists && part == 0) params.delta[at] = delta;
        } else if (exists) {
            delta = params.delta[at];
        }
        if (!exists || part != 0) continue;
        const float lse = params.lse[at];
        float* to = params.stats + 2 * head * params.stride + token;
        to[0] = lse == -INFINITY ? 0.0f : -lse * params.lse_scale;  // a row that sees nothing is hidden everywhere
        to[params.stride] = -delta;
    }
}

template <int kDim, class T>
cudaError_t launch(const StatsParams& params, bool out_is_fp32, cudaStream_t stream) {
    // Below 2^31: more would be 2^37 vectors, which no memory holds.
    const int64_t blocks = (int64_t{params.total_q} + kTokens - 1) / kTokens * params.num_heads;
    const dim3 grid(static_cast<unsigned>(blocks));
    if (out_is_fp32) return start(stats_kernel<kDim, T, float>, grid, kThreads, 0, stream, params);
    return start(stats_kernel<kDim, T, T>, grid, kThreads, 0, stream, params);
}

template <class T>
cudaError_t launch(const StatsParams& params, int32_t head_dim, bool out_is_fp32, cudaStream_t stream) {
    return head_dim == 64 ? launch<64, T>(params, out_is_fp32, stream) : launch<128, T>(params, out_is_fp32, stream);
}

}  // namespace

int make_stats(const BackwardArgs& args, cudaStream_t stream) {
    const AttentionShape& shape = args.shape;
    if (shape.total_q == 0) return 0;
    const StatsParams params{args.dout,
                             args.out,
                             args.lse,
                             args.dlse,
                             args.delta,
                             args.stats,
                             stats_stride(shape.total_q),
                             shape.total_q,
                             shape.num_heads_q,
                             shape.softcap > 0 ? kLog2e : 1 / least_scale(shape)};
    const bool out_is_fp32 = args.out_dtype == Dtype::fp32;
    const cudaError_t status = shape.dtype == Dtype::bf16 ? launch<__nv_bfloat16>(params, shape.head_dim, out_is_fp32, stream)
                                                          : launch<__half>(params, shape.head_dim, out_is_fp32, stream);
    return status == cudaSuccess ? 0 : fail("backward statistics", status);
}

}  // namespace magi

MAGI_EXPORT int64_t magi_ffa_stats_floats(int32_t total_q, int32_t num_heads_q) { return 2 * magi::stats_stride(total_q) * num_heads_q; }
