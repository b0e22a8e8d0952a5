// What the library says about how it was compiled. Knows no kernel.
#include "attention/launch.h"
#include "magi_build.inc"

// "arch=sm_90a nvcc=13.0.88"
MAGI_EXPORT const char* magi_ffa_build_info() { return "arch=" MAGI_BUILD_ARCH " nvcc=" MAGI_BUILD_NVCC; }
