// Outputs become NaN when a list that was made on the device is not the mask that was asked for. Knows nothing of lists or attention.
#include <cuda_runtime.h>

#include <string>

#include "attention/device_work.h"
#include "attention/sm90/host.h"

namespace magi {

namespace {

constexpr int kNumReasons = 3;  // bits of DeviceWorkStatus

// All bits set is a NaN in every floating point format.
__global__ void poison(const __grid_constant__ PoisonArgs args) {
    if ((*args.status & args.bits) == 0) return;
    const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, step = int64_t{gridDim.x} * blockDim.x;
    // A word per reason and plain stores: the host clears them while others may be written, and not every bus has atomics.
    if (args.reports != nullptr && first < kNumReasons && (*args.status >> first & 1) != 0)
        *static_cast<volatile int32_t*>(args.reports + first) = 1;
#pragma unroll
    for (int buffer = 0; buffer < 4; ++buffer) {
        if (buffer >= args.num_buffers) break;
        const int64_t num_vectors = args.num_bytes[buffer] / 16;
        for (int64_t idx = first; idx < num_vectors; idx += step)
            static_cast<uint4*>(args.data[buffer])[idx] = make_uint4(~0u, ~0u, ~0u, ~0u);
        for (int64_t idx = 16 * num_vectors + first; idx < args.num_bytes[buffer]; idx += step)
            static_cast<uint8_t*>(args.data[buffer])[idx] = 0xFF;
    }
}

}  // namespace
}  // namespace magi

MAGI_EXPORT int magi_ffa_poison(const magi::PoisonArgs* args, void* stream) {
    if (args->status == nullptr) return magi::fail("status must be given");
    if (args->num_buffers < 0 || args->num_buffers > 4)
        return magi::fail("num_buffers=" + std::to_string(args->num_buffers) + " must be from 0 to 4");
    for (int32_t buffer = 0; buffer < args->num_buffers; ++buffer)
        if (args->num_bytes[buffer] < 0 || reinterpret_cast<uintptr_t>(args->data[buffer]) % 16 != 0)
            return magi::fail("data[" + std::to_string(buffer) + "] must be aligned to 16 bytes and num_bytes at least 0");
    constexpr int kBlocks = 264;  // two CTAs per multiprocessor; nearly always they return at once
    magi::poison<<<kBlocks, 256, 0, static_cast<cudaStream_t>(stream)>>>(*args);
    const cudaError_t launched = cudaGetLastError();
    return launched == cudaSuccess ? 0 : magi::fail("poison", launched);
}
