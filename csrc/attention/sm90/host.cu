// Tensor maps and error texts of the launchers. No kernel here.
#include "attention/sm90/host.h"

namespace magi {

namespace {

thread_local std::string last_error;

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                 const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill);

// The driver is not linked: the library must load on machines without one.
EncodeTiled find_encoder() {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
        return nullptr;
    return reinterpret_cast<EncodeTiled>(entry);
}

}  // namespace

int fail(const std::string& reason) {
    last_error = reason;
    return 1;
}

int fail(const char* what, cudaError_t status) {
    (void)cudaGetLastError();  // told here; the next launch of somebody else must not find it
    return fail(std::string(what) + ": " + cudaGetErrorString(status));
}

namespace {

// Four dimensions, the first one contiguous; strides of the others in bytes.
int encode(CUtensorMap& map, CUtensorMapDataType type, void* data, const cuuint64_t (&dims)[4], const cuuint64_t (&strides)[3],
           const cuuint32_t (&box)[4], CUtensorMapSwizzle swizzle) {
    static const EncodeTiled encoder = find_encoder();
    if (encoder == nullptr) return fail("the CUDA driver has no cuTensorMapEncodeTiled; it must be for CUDA 12.0 or newer");
    const cuuint32_t steps[4] = {1, 1, 1, 1};
    const CUresult status = encoder(&map, type, 4, data, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status == CUDA_SUCCESS) return 0;
    std::string text = "no tensor map, CUresult " + std::to_string(status) +
                       ": the pointer must be 16-byte aligned and strides multiples of 16 bytes; sizes";
    for (const cuuint64_t dim : dims) text += " " + std::to_string(dim);
    text += ", strides in bytes";
    for (const cuuint64_t stride : strides) text += " " + std::to_string(stride);
    return fail(text);
}

}  // namespace

int encode_map(CUtensorMap& map, const TokenTensor& tensor, Dtype dtype, int32_t tokens, int32_t heads, int32_t head_dim,
               int32_t box_tokens, int32_t box_columns) {
    const int64_t size = dtype == Dtype::fp32 ? 4 : 2;
    const auto width = static_cast<cuuint32_t>(128 / size);
    const CUtensorMapDataType type = dtype == Dtype::fp32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : dtype == Dtype::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    // The stride of a dimension of size 1 is never used, but must be one that the encoder takes.
    const int64_t token_stride = tokens > 1 ? tensor.token_stride * size : 128;
    const int64_t head_stride = heads > 1 ? tensor.head_stride * size : 128;
    return encode(map, type, tensor.data,
                  {width, static_cast<cuuint64_t>(tokens), static_cast<cuuint64_t>(head_dim) / width, static_cast<cuuint64_t>(heads)},
                  {static_cast<cuuint64_t>(token_stride), 128, static_cast<cuuint64_t>(head_stride)},
                  {width, static_cast<cuuint32_t>(box_tokens), static_cast<cuuint32_t>(box_columns), 1}, CU_TENSOR_MAP_SWIZZLE_128B);
}

int encode_planes_map(CUtensorMap& map, void* data, int32_t row, int64_t stride, int32_t planes, int32_t heads, int32_t box_elements) {
    const auto bytes = static_cast<cuuint64_t>(stride) * 4;
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, data,
                  {static_cast<cuuint64_t>(row), static_cast<cuuint64_t>(planes), 1, static_cast<cuuint64_t>(heads)},
                  {bytes, bytes, bytes * static_cast<cuuint64_t>(planes)},
                  {static_cast<cuuint32_t>(box_elements), static_cast<cuuint32_t>(planes), 1, 1}, CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace magi

extern "C" __attribute__((visibility("default"))) const char* magi_ffa_error() { return magi::last_error.c_str(); }
