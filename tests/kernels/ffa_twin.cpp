// Slow twin of the C ABI of csrc/attention/launch.h on host memory: the work list walked as csrc/attention/work.h describes it.
// For tests of the Python side on machines without a GPU; knows no CUDA and no torch. One thread, fp32 sums.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "attention/device_slices.h"
#include "attention/device_work.h"
#include "attention/launch.h"
#include "solver/tile_work.h"

using namespace magi;

namespace {

std::string last_error;
const float kMinusInf = -std::numeric_limits<float>::infinity();

float half_to_float(uint16_t bits) {
    const uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, fraction = bits & 1023u;
    if (exponent == 0) return std::ldexp(static_cast<float>(fraction), -24) * (sign ? -1.f : 1.f);
    const uint32_t wide = exponent == 31 ? (sign | 0x7f800000u | (fraction << 13)) : (sign | ((exponent + 112) << 23) | (fraction << 13));
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

float load(const void* data, int64_t idx, Dtype dtype) {
    if (dtype == Dtype::fp32) return static_cast<const float*>(data)[idx];
    const uint16_t bits = static_cast<const uint16_t*>(data)[idx];
    if (dtype == Dtype::fp16) return half_to_float(bits);
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

void store(void* data, int64_t idx, Dtype dtype, float value) {
    if (dtype == Dtype::fp32) static_cast<float*>(data)[idx] = value;
    if (dtype == Dtype::fp16) {
        const _Float16 half = static_cast<_Float16>(value);
        std::memcpy(static_cast<uint16_t*>(data) + idx, &half, 2);
    }
    if (dtype == Dtype::bf16) {
        uint32_t wide;
        std::memcpy(&wide, &value, 4);
        const uint32_t rounded = std::isnan(value) ? 0x7fc00000u : wide + 0x7fffu + ((wide >> 16) & 1u);
        static_cast<uint16_t*>(data)[idx] = static_cast<uint16_t>(rounded >> 16);
    }
}

// Columns of each row of a tile, as the list has them.
template <class See>
void walk(const Work& work, int32_t tile_rows, int32_t block_cols, See see) {
    for (int32_t slot = 0; slot < work.num_tiles; ++slot) {
        const int32_t tile = work.order[slot];
        const int32_t row_begin = work.cuts ? work.cuts[tile] : tile * tile_rows;
        const int32_t row_end = work.cuts ? work.cuts[tile + 1] : std::min((tile + 1) * tile_rows, work.num_rows);
        for (int32_t s = work.segment_offsets[tile]; s < work.segment_offsets[tile + 1]; ++s) {
            const WorkSegment& segment = work.segments[s];
            for (int32_t begin = segment.col_begin; begin < segment.col_end; begin += block_cols)
                for (int32_t row = row_begin; row < row_end; ++row)
                    for (int32_t col = begin; col < std::min(begin + block_cols, segment.col_end); ++col) {
                        bool sees = segment.piece_begin == segment.piece_end;
                        for (int32_t p = segment.piece_begin; p < segment.piece_end; ++p) {
                            const WorkPiece& w = work.pieces[p];
                            sees |= w.row_begin <= row && row < w.row_end && w.col_begin <= col && col < w.col_end && w.lo <= col - row &&
                                    col - row <= w.hi;
                        }
                        if (sees) see(row, col);
                    }
        }
    }
}

struct Problem {
    const AttentionShape& shape;
    const TokenTensor &q, &k, &v;

    float at(const TokenTensor& x, int64_t token, int64_t head, int64_t column) const {
        return load(x.data, token * x.token_stride + head * x.head_stride + column, shape.dtype);
    }
    // Capped score, and the slope of the cap there.
    std::pair<float, float> score(int64_t row, int64_t col, int64_t head) const {
        const int64_t kv_head = head / (shape.num_heads_q / shape.num_heads_kv);
        float sum = 0;
        for (int32_t d = 0; d < shape.head_dim; ++d) sum += at(q, row, head, d) * at(k, col, kv_head, d);
        sum *= shape.softmax_scale;
        if (shape.softcap == 0) return {sum, 1.f};
        const float bent = std::tanh(sum / shape.softcap);
        return {shape.softcap * bent, 1 - bent * bent};
    }
};

const char* fault(const AttentionShape& shape, const int32_t* counter, std::initializer_list<const TokenTensor*> tensors) {
    if (shape.head_dim != 64 && shape.head_dim != 128) return "head_dim is not 64 or 128";
    if (shape.softmax_scale < 0) return "softmax_scale is negative";
    if (shape.num_sms < 1) return "num_sms is below 1";
    if (shape.total_q < 1 || shape.total_k < 1) return "an empty side";
    if (counter == nullptr) return "no counter";
    for (const TokenTensor* x : tensors)
        if (reinterpret_cast<uintptr_t>(x->data) % 16 || x->token_stride % 8 || x->head_stride % 8 || x->token_stride <= 0 ||
            x->head_stride <= 0)
            return "a tensor that TMA cannot read";
    return nullptr;
}

// Vectors of 16 bytes are read and written.
bool is_odd(std::initializer_list<const void*> pointers) {
    return std::any_of(pointers.begin(), pointers.end(), [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 != 0; });
}

int refuse(const char* text) {
    last_error = text;
    return 1;
}

void tile(int32_t rows, int32_t cols, int32_t pair[2]) {
    pair[0] = rows;
    pair[1] = cols;
}

}  // namespace

MAGI_EXPORT int magi_ffa_forward_tile(int32_t head_dim, int32_t pair[2]) {
    if (head_dim != 64 && head_dim != 128) return refuse("no such head_dim");
    return tile(head_dim == 64 ? 48 : 32, 16, pair), 0;
}
MAGI_EXPORT int magi_ffa_forward_wide_tile(int32_t head_dim, int32_t pair[2]) { return tile(32, head_dim == 128 ? 24 : 0, pair), 0; }
MAGI_EXPORT int magi_ffa_backward_tile(int32_t, int32_t pair[2]) { return tile(16, 24, pair), 0; }
MAGI_EXPORT int magi_ffa_dq_tile(int32_t, int32_t pair[2]) { return tile(40, 8, pair), 0; }
MAGI_EXPORT int64_t magi_ffa_stats_floats(int32_t total_q, int32_t num_heads_q) { return 2 * int64_t{total_q} * num_heads_q; }
MAGI_EXPORT const char* magi_ffa_error() { return last_error.c_str(); }
MAGI_EXPORT const char* magi_ffa_variants() {
    return "forward:bf16:64:0,forward:bf16:128:0,forward:bf16:64:1,forward:fp16:64:0,backward:bf16:64:0";
}
MAGI_EXPORT const char* magi_ffa_build_info() { return "arch=sm_90a nvcc=0"; }

MAGI_EXPORT int magi_ffa_forward(const ForwardArgs* a, void*) {
    if (const char* text = fault(a->shape, a->counter, {&a->q, &a->k, &a->v})) return refuse(text);
    if (is_odd({a->out})) return refuse("out is not aligned");
    const AttentionShape& shape = a->shape;
    const Problem problem{shape, a->q, a->k, a->v};
    const int64_t heads = shape.num_heads_q, width = shape.head_dim;
    std::vector<std::vector<int32_t>> seen(shape.total_q);
    walk(a->work, a->work.tile_rows, a->work.block_cols, [&](int32_t row, int32_t col) { seen[row].push_back(col); });
    for (int64_t row = 0; row < shape.total_q; ++row)
        for (int64_t head = 0; head < heads; ++head) {
            const int64_t at = row * heads + head;
            const float start = a->accumulate ? a->lse[at] : a->sink_lse ? a->sink_lse[row * a->sink_token_stride + head] : kMinusInf;
            float top = start, total = 0;
            std::vector<float> scores, sum(width, 0.f);
            for (int32_t col : seen[row]) {
                scores.push_back(problem.score(row, col, head).first);
                top = std::max(top, scores.back());
                if (a->max_logits) a->max_logits[head] = std::max(a->max_logits[head], scores.back());
            }
            if (top == kMinusInf) top = 0;
            total = std::exp(start - top);
            if (a->accumulate)
                for (int64_t d = 0; d < width; ++d) sum[d] = total * load(a->out, at * width + d, a->out_dtype);
            for (size_t i = 0; i < scores.size(); ++i) {
                const float weight = std::exp(scores[i] - top);
                total += weight;
                for (int64_t d = 0; d < width; ++d)
                    sum[d] += weight * problem.at(a->v, seen[row][i], head / (heads / shape.num_heads_kv), d);
            }
            a->lse[at] = total > 0 ? top + std::log(total) : kMinusInf;
            for (int64_t d = 0; d < width; ++d) store(a->out, at * width + d, a->out_dtype, total > 0 ? sum[d] / total : 0.f);
        }
    return 0;
}

MAGI_EXPORT int magi_ffa_backward(const BackwardArgs* a, void*) {
    if (const char* text = fault(a->shape, a->counter, {&a->q, &a->k, &a->v, &a->dout})) return refuse(text);
    if (is_odd({a->out, a->stats, a->dq, a->dk, a->dv})) return refuse("out, stats or a gradient is not aligned");
    const AttentionShape& shape = a->shape;
    const Problem problem{shape, a->q, a->k, a->v};
    const int64_t heads = shape.num_heads_q, heads_kv = shape.num_heads_kv, width = shape.head_dim;
    const auto wide = [&](void* from) {
        std::vector<float> sums(shape.total_k * heads_kv * width, 0.f);
        for (size_t i = 0; a->accumulate_dkv && i < sums.size(); ++i) sums[i] = load(from, i, a->dkv_dtype);
        return sums;
    };
    std::vector<float> dk = wide(a->dk), dv = wide(a->dv);
    for (int64_t at = 0; a->out && at < shape.total_q * heads; ++at) {
        a->delta[at] = a->dlse ? -a->dlse[at] : 0.f;
        for (int64_t d = 0; d < width; ++d) {
            const float out = load(a->out, at * width + d, a->out_dtype);
            if (out != 0) a->delta[at] += out * problem.at(a->dout, at / heads, at % heads, d);
        }
    }
    for (int64_t i = 0; i < magi_ffa_stats_floats(shape.total_q, shape.num_heads_q); ++i) a->stats[i] = kMinusInf;
    const auto visit = [&](int32_t row, int32_t col, bool adds_dq, bool adds_dkv) {
        for (int64_t head = 0; head < heads; ++head) {
            const int64_t kv = head / (heads / heads_kv), at = row * heads + head, key = (col * heads_kv + kv) * width;
            const auto [score, slope] = problem.score(row, col, head);
            const float weight = std::exp(score - a->lse[at]);
            float product = 0;
            for (int64_t d = 0; d < width; ++d) product += problem.at(a->dout, row, head, d) * problem.at(a->v, col, kv, d);
            const float dscore = weight * (product - a->delta[at]) * slope * shape.softmax_scale;
            for (int64_t d = 0; d < width; ++d) {
                if (adds_dq) a->dq[at * width + d] += dscore * problem.at(a->k, col, kv, d);
                if (adds_dkv) dk[key + d] += dscore * problem.at(a->q, row, head, d);
                if (adds_dkv) dv[key + d] += weight * problem.at(a->dout, row, head, d);
            }
        }
    };
    const bool has_own_list = a->work_dq.num_tiles > 0;
    int32_t pair[2];
    magi_ffa_backward_tile(shape.head_dim, pair);
    walk(a->work, pair[0], pair[1], [&](int32_t row, int32_t col) { visit(col, row, !has_own_list, true); });
    magi_ffa_dq_tile(shape.head_dim, pair);
    if (has_own_list) walk(a->work_dq, pair[0], pair[1], [&](int32_t row, int32_t col) { visit(row, col, true, false); });
    for (size_t i = 0; i < dk.size(); ++i) {
        store(a->dk, i, a->dkv_dtype, dk[i]);
        store(a->dv, i, a->dkv_dtype, dv[i]);
    }
    return 0;
}

// ---- the device planner: slices as the device reads them, the list as the host makes it ----

MAGI_EXPORT int magi_ffa_device_work_layout(const DeviceWorkArgs* args, DeviceWorkLayout* layout) {
    *layout = plan_workspace(*args).list;
    return 0;
}

MAGI_EXPORT int magi_ffa_device_work(const DeviceWorkArgs* args, void*) {
    DeviceWorkArgs untransposed = *args;
    untransposed.is_transposed = 0;
    const DeviceWorkLayout layout = plan_workspace(*args).list;
    int32_t status = 0;
    std::vector<Slice> slices;
    for (int64_t idx = 0; idx < args->num_slices; ++idx) slices.push_back(read_slice(untransposed, idx, status));
    const TileWork work = build_tile_work(slices, layout.num_rows, {args->tile_rows, args->block_cols}, args->is_transposed != 0);
    int32_t* list = args->workspace;
    const int32_t header[4] = {status, static_cast<int32_t>(work.segments.size()), static_cast<int32_t>(work.pieces.size()), 0};
    const auto put = [list](int64_t offset, const auto* records, size_t count) {
        if (count) std::memcpy(list + offset, records, count * sizeof(*records));
    };
    put(0, header, 4);
    put(layout.offset_order, work.order.data(), work.order.size());
    put(layout.offset_segment_offsets, work.segment_offsets.data(), work.segment_offsets.size());
    put(layout.offset_segments, work.segments.data(), work.segments.size());
    put(layout.offset_pieces, work.pieces.data(), work.pieces.size());
    return 0;
}

MAGI_EXPORT int magi_ffa_poison(const PoisonArgs* args, void*) {
    for (int32_t idx = 0; idx < args->num_buffers; ++idx)
        if (is_odd({args->data[idx]})) return refuse("a buffer is not aligned");
    for (int32_t idx = 0; (*args->status & args->bits) && idx < args->num_buffers; ++idx)
        std::memset(args->data[idx], 0xff, args->num_bytes[idx]);
    for (int32_t bit = 0; (*args->status & args->bits) && args->reports && bit < 3; ++bit)
        if (*args->status >> bit & 1) args->reports[bit] = 1;
    return 0;
}
