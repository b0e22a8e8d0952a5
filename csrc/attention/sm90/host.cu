// Tensor maps and error texts of the launchers. No kernel here.
#include "attention/sm90/host.h"

namespace magi {

namespace {

thread_local std::string last_error;

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

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

int fail(const char* what, cudaError_t status) { return fail(std::string(what) + ": " + cudaGetErrorString(status)); }

int encode_map(CUtensorMap& map, const TokenTensor& tensor, Dtype dtype, int32_t tokens, int32_t heads, int32_t head_dim, MapBox box) {
    static const EncodeTiled encode = find_encoder();
    if (encode == nullptr) return fail("the CUDA driver has no cuTensorMapEncodeTiled; it must be for CUDA 12.0 or newer");
    const uint64_t size = dtype == Dtype::fp32 ? 4 : 2;
    const CUtensorMapDataType type = dtype == Dtype::fp32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : dtype == Dtype::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    // The stride of a dimension of size 1 is never used, but must be one that the encoder takes.
    const int64_t token_stride = tokens > 1 ? tensor.token_stride : head_dim;
    const int64_t head_stride = heads > 1 ? tensor.head_stride : head_dim;
    const cuuint64_t dims[3] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(tokens), static_cast<cuuint64_t>(heads)};
    const cuuint64_t strides[2] = {static_cast<cuuint64_t>(token_stride) * size, static_cast<cuuint64_t>(head_stride) * size};
    const cuuint32_t boxes[3] = {static_cast<cuuint32_t>(box.elements), static_cast<cuuint32_t>(box.tokens), 1};
    const cuuint32_t steps[3] = {1, 1, 1};
    const CUresult status =
        encode(&map, type, 3, tensor.data, dims, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status == CUDA_SUCCESS) return 0;
    return fail("no tensor map for tokens=" + std::to_string(tokens) + " heads=" + std::to_string(heads) + " head_dim=" +
                std::to_string(head_dim) + " token_stride=" + std::to_string(token_stride) + " head_stride=" + std::to_string(head_stride) +
                " (elements): the pointer must be 16-byte aligned and strides multiples of 16 bytes; CUresult " + std::to_string(status));
}

}  // namespace magi

extern "C" __attribute__((visibility("default"))) const char* magi_ffa_error() { return magi::last_error.c_str(); }
