// What lets one function be compiled for the host and for a GPU. Knows no mask; needs no CUDA header.
#pragma once

#if defined(__CUDACC__)
#define MAGI_HOST_DEVICE __host__ __device__
#define MAGI_DEVICE __device__  // device code that a host compiler also accepts, so that it is tested without a GPU
#else
#define MAGI_HOST_DEVICE
#define MAGI_DEVICE
#endif

namespace magi {

// std::min and std::max cannot be called on a device without a compiler switch.
template <class T>
MAGI_HOST_DEVICE constexpr T smaller(T a, T b) {
    return b < a ? b : a;
}

template <class T>
MAGI_HOST_DEVICE constexpr T larger(T a, T b) {
    return a < b ? b : a;
}

}  // namespace magi
