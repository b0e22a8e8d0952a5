// Running maximum and sum of the two rows a thread of a wgmma accumulator holds. Knows nothing of loads or tiles.
#pragma once

#include <cstdint>

#include "ptx/warpgroup.cuh"

namespace magi::sm90 {

// tanh by one exponential and one reciprocal (the hardware's own is good to 5e-4 only). Near 0 the difference of two ones keeps no digits,
// and a large cap multiplies what is lost: two terms of the series there, relative error 1e-7 at 1/32.
__device__ __forceinline__ float tanh_exact(float x) {
    const float far = 1.0f - 2.0f * ptx::reciprocal_fast(ptx::exp2_fast(x * 2.885390082f) + 1.0f);
    return fabsf(x) < 0.03125f ? fmaf(x * x, x * -0.33333333f, x) : far;
}

struct SoftmaxRows {
    float maximum[2] = {-INFINITY, -INFINITY};  // of the raw scores
    float sum[2] = {0, 0};                      // of this thread's columns, relative to the maximum

    // scores become exp2(scale_log2 * (score - maximum)); rescale is the factor for what was summed before.
    template <int N>
    __device__ __forceinline__ void update(float (&scores)[N], float scale_log2, float (&rescale)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = maximum[r];
#pragma unroll
            for (int i = 0; i < N / 4; ++i) top = fmaxf(top, fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            // A row that sees nothing yet: every exponent is -inf - 0.
            const float shift = top == -INFINITY ? 0.0f : top * scale_log2;
            rescale[r] = ptx::exp2_fast(maximum[r] * scale_log2 - shift);
            maximum[r] = top;
            float total = 0;
#pragma unroll
            for (int i = 0; i < N / 4; ++i) {
#pragma unroll
                for (int p = 0; p < 2; ++p) {
                    float& score = scores[4 * i + 2 * r + p];
                    score = ptx::exp2_fast(fmaf(score, scale_log2, -shift));
                    total += score;
                }
            }
            sum[r] = sum[r] * rescale[r] + total;
        }
    }

    __device__ __forceinline__ void join_quad() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
            sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        }
    }

    // lse (natural) of row r joined with `other`; factor normalises the accumulator, keep is the weight of what `other` stands for.
    __device__ __forceinline__ float join(int r, float scale_log2, float other, float& factor, float& keep) const {
        constexpr float kLn2 = 0.6931471805599453f;
        const bool sees = sum[r] > 0;
        const float own = sees ? maximum[r] * scale_log2 * kLn2 + logf(sum[r]) : -INFINITY;
        // NaN scores: the sum is NaN, and so must be the row.
        if (sum[r] != sum[r]) {
            factor = keep = sum[r];
            return sum[r];
        }
        if (other == -INFINITY) {
            factor = sees ? 1.0f / sum[r] : 0.0f;
            keep = 0;
            return own;
        }
        const float top = fmaxf(own, other);
        const float total = top + logf(expf(own - top) + expf(other - top));
        factor = sees ? expf(own - total) / sum[r] : 0.0f;
        keep = expf(other - total);
        return total;
    }

    // All lanes call; raises *logit to the largest score of the warp's rows. Rows `row` and `row + 8` are this lane's; those from num_rows
    // on do not exist, and interior blocks do not hide them.
    __device__ __forceinline__ void raise_maximum(float* logit, float scale, int lane, int row, int num_rows) const {
        float top = fmaxf(row < num_rows ? maximum[0] : -INFINITY, row + 8 < num_rows ? maximum[1] : -INFINITY);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
        top = top * scale + 0.0f;  // -0 would order below -inf
        if (lane != 0 || top == -INFINITY) return;
        // IEEE numbers order like integers of their sign: larger positive is larger, larger negative is smaller.
        if (top >= 0)
            atomicMax(reinterpret_cast<int*>(logit), __float_as_int(top));
        else
            atomicMin(reinterpret_cast<unsigned*>(logit), __float_as_uint(top));
    }
};

}  // namespace magi::sm90
