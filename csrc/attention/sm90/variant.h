// Names and types of the variant a file is compiled for, from the -D flags of the build.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define MAGI_JOIN_(direction, dtype, head_dim, softcap) direction##_##dtype##_d##head_dim##_cap##softcap
#define MAGI_JOIN(direction, dtype, head_dim, softcap) MAGI_JOIN_(direction, dtype, head_dim, softcap)
#define MAGI_VARIANT_NAME(direction) MAGI_JOIN(direction, MAGI_VARIANT_DTYPE, MAGI_VARIANT_HEAD_DIM, MAGI_VARIANT_SOFTCAP)

namespace magi {

namespace element {
using bf16 = __nv_bfloat16;
using fp16 = __half;
}  // namespace element
using VariantElement = element::MAGI_VARIANT_DTYPE;

}  // namespace magi
