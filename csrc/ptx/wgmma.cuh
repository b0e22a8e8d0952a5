// Warpgroup matrix products (wgmma, sm_90a): 64 rows, fp32 accumulators in registers. Knows nothing of attention.
//
// Accumulator layout of a warpgroup (m64nN): thread t holds, for j in [0, N / 8), acc[4 j + 0, 1] at row 16 (t / 32) + (t % 32) / 4,
// columns 8 j + 2 (t % 4) + 0, 1, and acc[4 j + 2, 3] the same columns eight rows further down. The 16 bit A fragment of step k (columns
// 16 k ...) is pack(acc[8 k + 0, 1]), pack(acc[8 k + 2, 3]), pack(acc[8 k + 4, 5]), pack(acc[8 k + 6, 7]) of such a layout.
// PTX ISA, "Asynchronous warpgroup level matrix instructions".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/barrier.cuh"

namespace magi::ptx {

// Accumulators are about to be used by wgmma, or A registers were written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of the registers across the point.
template <int N>
__device__ __forceinline__ void pin(float (&registers)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(uint32_t (&registers)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Operand in shared memory with 128-byte swizzle: rows of 64 elements of 16 bits, groups of 8 rows are 1,024 bytes apart.
// As K-major operand the row is along the summed dimension; as MN-major (transposed) one the rows are the summed dimension and
// further 64-element columns lie `column_bytes` apart. Address must be 1,024-byte aligned but for steps inside a row or whole groups of
// rows.
__device__ __forceinline__ uint64_t operand(const void* shared, uint32_t column_bytes = 16) {
    const uint64_t address = shared_address(shared);
    return ((address & 0x3FFFF) >> 4) | (static_cast<uint64_t>(column_bytes >> 4) << 16) | (static_cast<uint64_t>(1024 >> 4) << 32) |
           (static_cast<uint64_t>(1) << 62);
}

// Moves an operand by whole bytes (a multiple of 16). The address is in the lower word: no carry to wait for.
__device__ __forceinline__ uint64_t advance(uint64_t operand, uint32_t bytes) {
    const uint32_t lower = static_cast<uint32_t>(operand) + (bytes >> 4);
    return (operand & 0xFFFFFFFF00000000) | lower;
}

// One step of 16: acc = (accumulate ? acc : 0) + A B.
template <class T, int N, bool kTransA, bool kTransB>
struct Wgmma;

#define MAGI_WGMMA_32(TYPE, NAME)                                                                                                      \
    template <bool kTransA, bool kTransB>                                                                                              \
    struct Wgmma<TYPE, 32, kTransA, kTransB> {                                                                                         \
        static __device__ __forceinline__ void ss(float (&acc)[16], uint64_t a, uint64_t b, int accumulate) {                          \
            asm volatile(                                                                                                              \
                "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"                                                                           \
                "wgmma.mma_async.sync.aligned.m64n32k16.f32." NAME "." NAME                                                            \
                " "                                                                                                                    \
                "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "                                             \
                "%16, %17, p, 1, 1, %19, %20;\n}\n"                                                                                    \
                : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]),      \
                  "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]) \
                : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB));                                                        \
        }                                                                                                                              \
        static __device__ __forceinline__ void rs(float (&acc)[16], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b,    \
                                                  int accumulate) {                                                                    \
            asm volatile(                                                                                                              \
                "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"                                                                           \
                "wgmma.mma_async.sync.aligned.m64n32k16.f32." NAME "." NAME                                                            \
                " "                                                                                                                    \
                "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "                                             \
                "{%16, %17, %18, %19}, %20, p, 1, 1, %22;\n}\n"                                                                        \
                : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]),      \
                  "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]) \
                : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(kTransB));                                          \
        }                                                                                                                              \
    };
MAGI_WGMMA_32(__nv_bfloat16, "bf16")
MAGI_WGMMA_32(__half, "f16")
#undef MAGI_WGMMA_32

#define MAGI_WGMMA_64(TYPE, NAME)                                                                                                         \
    template <bool kTransA, bool kTransB>                                                                                                 \
    struct Wgmma<TYPE, 64, kTransA, kTransB> {                                                                                            \
        static __device__ __forceinline__ void ss(float (&acc)[32], uint64_t a, uint64_t b, int accumulate) {                             \
            asm volatile(                                                                                                                 \
                "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                                              \
                "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME                                                               \
                " "                                                                                                                       \
                "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "    \
                "%25, %26, %27, %28, %29, %30, %31}, "                                                                                    \
                "%32, %33, p, 1, 1, %35, %36;\n}\n"                                                                                       \
                : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]),         \
                  "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]),   \
                  "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), \
                  "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31])  \
                : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB));                                                           \
        }                                                                                                                                 \
        static __device__ __forceinline__ void rs(float (&acc)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b,       \
                                                  int accumulate) {                                                                       \
            asm volatile(                                                                                                                 \
                "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                                                              \
                "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME                                                               \
                " "                                                                                                                       \
                "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "    \
                "%25, %26, %27, %28, %29, %30, %31}, "                                                                                    \
                "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"                                                                           \
                : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]),         \
                  "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]),   \
                  "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), \
                  "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31])  \
                : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(kTransB));                                             \
        }                                                                                                                                 \
    };
MAGI_WGMMA_64(__nv_bfloat16, "bf16")
MAGI_WGMMA_64(__half, "f16")
#undef MAGI_WGMMA_64

#define MAGI_WGMMA_128(TYPE, NAME)                                                                                                         \
    template <bool kTransA, bool kTransB>                                                                                                  \
    struct Wgmma<TYPE, 128, kTransA, kTransB> {                                                                                            \
        static __device__ __forceinline__ void ss(float (&acc)[64], uint64_t a, uint64_t b, int accumulate) {                              \
            asm volatile(                                                                                                                  \
                "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                                               \
                "wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME                                                               \
                " "                                                                                                                        \
                "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "     \
                "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
                "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                                             \
                "%64, %65, p, 1, 1, %67, %68;\n}\n"                                                                                        \
                : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]),          \
                  "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]),    \
                  "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]),  \
                  "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]),  \
                  "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]),  \
                  "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]),  \
                  "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]), "+f"(acc[54]), "+f"(acc[55]),  \
                  "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]), "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63])   \
                : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB));                                                            \
        }                                                                                                                                  \
        static __device__ __forceinline__ void rs(float (&acc)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b,        \
                                                  int accumulate) {                                                                        \
            asm volatile(                                                                                                                  \
                "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                                                               \
                "wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME                                                               \
                " "                                                                                                                        \
                "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "     \
                "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
                "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                                             \
                "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"                                                                            \
                : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]),          \
                  "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]),    \
                  "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]),  \
                  "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]),  \
                  "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]),  \
                  "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]),  \
                  "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]), "+f"(acc[54]), "+f"(acc[55]),  \
                  "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]), "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63])   \
                : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(kTransB));                                              \
        }                                                                                                                                  \
    };
MAGI_WGMMA_128(__nv_bfloat16, "bf16")
MAGI_WGMMA_128(__half, "f16")
#undef MAGI_WGMMA_128

// Only as scores of wide blocks: both operands in shared memory.
#define MAGI_WGMMA_160(TYPE, NAME)                                                                                                         \
    template <bool kTransA, bool kTransB>                                                                                                  \
    struct Wgmma<TYPE, 160, kTransA, kTransB> {                                                                                            \
        static __device__ __forceinline__ void ss(float (&acc)[80], uint64_t a, uint64_t b, int accumulate) {                              \
            asm volatile(                                                                                                                  \
                "{\n.reg .pred p;\nsetp.ne.b32 p, %82, 0;\n"                                                                               \
                "wgmma.mma_async.sync.aligned.m64n160k16.f32." NAME "." NAME                                                               \
                " "                                                                                                                        \
                "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "     \
                "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
                "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, " \
                "%73, %74, %75, %76, %77, %78, %79}, "                                                                                     \
                "%80, %81, p, 1, 1, %83, %84;\n}\n"                                                                                        \
                : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]),          \
                  "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]),    \
                  "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]),  \
                  "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]),  \
                  "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]),  \
                  "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]),  \
                  "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]), "+f"(acc[54]), "+f"(acc[55]),  \
                  "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]), "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63]),  \
                  "+f"(acc[64]), "+f"(acc[65]), "+f"(acc[66]), "+f"(acc[67]), "+f"(acc[68]), "+f"(acc[69]), "+f"(acc[70]), "+f"(acc[71]),  \
                  "+f"(acc[72]), "+f"(acc[73]), "+f"(acc[74]), "+f"(acc[75]), "+f"(acc[76]), "+f"(acc[77]), "+f"(acc[78]), "+f"(acc[79])   \
                : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB));                                                            \
        }                                                                                                                                  \
    };
MAGI_WGMMA_160(__nv_bfloat16, "bf16")
MAGI_WGMMA_160(__half, "f16")
#undef MAGI_WGMMA_160

}  // namespace magi::ptx
