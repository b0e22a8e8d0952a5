// The band slice: the one mask record, closed under clip, move, transpose and tighten.
// Plain C++20; knows nothing of CUDA, torch, Python, ranks or chunks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/host_device.h"

namespace magi {

// Token ids are below 2^30, so a band bound of +-2^30 never binds and i + hi stays inside int32.
inline constexpr int32_t kUnbounded = 1 << 30;
inline constexpr int64_t kMaxTokens = kUnbounded - 1;

// Query i sees key j  <=>  q_start <= i < q_end, k_start <= j < k_end, lo <= j - i <= hi.
// The layout (six consecutive int32) is shared with Python: numpy int32 [N, 6].
struct Slice {
    int32_t q_start = 0, q_end = 0, k_start = 0, k_end = 0;
    int32_t lo = -kUnbounded, hi = kUnbounded;

    friend bool operator==(const Slice&, const Slice&) = default;
};
static_assert(sizeof(Slice) == 24, "Slice is read from numpy int32 [N, 6]");

MAGI_HOST_DEVICE inline int32_t clamp_bound(int64_t bound) {
    return static_cast<int32_t>(smaller<int64_t>(larger<int64_t>(bound, -kUnbounded), kUnbounded));
}

// A bound at or past the sentinel stays unbounded wherever the slice moves.
inline int32_t move_bound(int32_t bound, int64_t delta) {
    if (bound <= -kUnbounded || bound >= kUnbounded) return bound;
    return clamp_bound(bound + delta);
}

MAGI_HOST_DEVICE inline bool has_no_rows(const Slice& s) { return s.q_start >= s.q_end || s.k_start >= s.k_end || s.lo > s.hi; }

// Shrinks the ranges to the bounding box of the band and replaces bounds that do not bind by the sentinels,
// so that equal cell sets in one rectangle are equal records. Returns false when no cell is left.
MAGI_HOST_DEVICE inline bool tighten(Slice& s) {
    if (has_no_rows(s)) return false;
    // Row i has a key iff k_start <= i + hi and i + lo <= k_end - 1; the same by columns. All in 64 bits.
    const int64_t q_start = larger<int64_t>(s.q_start, int64_t{s.k_start} - s.hi);
    const int64_t q_end = smaller<int64_t>(s.q_end, int64_t{s.k_end} - s.lo);
    if (q_start >= q_end) return false;
    const int64_t k_start = larger<int64_t>(s.k_start, q_start + s.lo);
    const int64_t k_end = smaller<int64_t>(s.k_end, q_end + s.hi);
    if (k_start >= k_end) return false;
    s.q_start = static_cast<int32_t>(q_start);
    s.q_end = static_cast<int32_t>(q_end);
    s.k_start = static_cast<int32_t>(k_start);
    s.k_end = static_cast<int32_t>(k_end);
    if (s.lo <= k_start - (q_end - 1)) s.lo = -kUnbounded;
    if (s.hi >= (k_end - 1) - q_start) s.hi = kUnbounded;
    return true;
}

// Cells of the slice inside the rectangle; may be empty (tighten tells).
MAGI_HOST_DEVICE inline Slice clip(Slice s, int32_t q_start, int32_t q_end, int32_t k_start, int32_t k_end) {
    s.q_start = larger(s.q_start, q_start);
    s.q_end = smaller(s.q_end, q_end);
    s.k_start = larger(s.k_start, k_start);
    s.k_end = smaller(s.k_end, k_end);
    return s;
}

// The slice after its queries moved by dq and its keys by dk.
inline Slice move(Slice s, int64_t dq, int64_t dk) {
    s.q_start = static_cast<int32_t>(s.q_start + dq);
    s.q_end = static_cast<int32_t>(s.q_end + dq);
    s.k_start = static_cast<int32_t>(s.k_start + dk);
    s.k_end = static_cast<int32_t>(s.k_end + dk);
    s.lo = move_bound(s.lo, dk - dq);
    s.hi = move_bound(s.hi, dk - dq);
    return s;
}

// The view of the backward pass: keys walk as rows.
MAGI_HOST_DEVICE inline Slice transpose(const Slice& s) { return {s.k_start, s.k_end, s.q_start, s.q_end, -s.hi, -s.lo}; }

// Cells two slices share: again a slice.
inline Slice intersect(const Slice& a, const Slice& b) {
    Slice s = clip(a, b.q_start, b.q_end, b.k_start, b.k_end);
    s.lo = std::max(a.lo, b.lo);
    s.hi = std::min(a.hi, b.hi);
    return s;
}

// Number of visible pairs, closed form: cells with j - i <= x (local ids) are F(x) = S(x + m) - S(x).
inline int64_t area(const Slice& s) {
    if (has_no_rows(s)) return 0;
    const int64_t m = int64_t{s.q_end} - s.q_start;
    const int64_t n = int64_t{s.k_end} - s.k_start;
    const auto triangle = [n](int64_t t) {
        if (t <= 0) return int64_t{0};
        if (t <= n) return t * (t + 1) / 2;
        return n * (n + 1) / 2 + (t - n) * n;
    };
    const auto cells_up_to = [&](int64_t x) {
        x = std::clamp<int64_t>(x, -m, n - 1);
        return triangle(x + m) - triangle(x);
    };
    const int64_t offset = int64_t{s.k_start} - s.q_start;
    return cells_up_to(s.hi - offset) - cells_up_to(int64_t{s.lo} - 1 - offset);
}

}  // namespace magi
