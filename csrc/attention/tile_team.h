// Scans, sorts and searches by a team of threads: a CTA on a device, one or more plain threads in a test. Knows no slice and no tile.
//
// A team type has rank(), size(), sync() (all threads reach it), lanes that vote: lane(), width(), ballot(bool) -> uint32_t of the
// lanes of one group (all of them call it), and partials(): int64_t [size] that the scans use. Every function here is called by all
// threads with equal arguments, finds its inputs complete and leaves its results complete: it ends with sync().
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace magi {

struct Sum {
    MAGI_DEVICE int64_t operator()(int64_t a, int64_t b) const { return a + b; }
};

struct Max {
    MAGI_DEVICE int64_t operator()(int64_t a, int64_t b) const { return larger(a, b); }
};

// Calls out(i, value(0) op ... op value(i - 1)) for every i < n and returns the whole; 0 is what op starts from. value(i) is called
// twice and may not depend on what out writes, except out(i) on value(i) itself.
template <class Team, class Op, class Value, class Out>
MAGI_DEVICE int64_t team_scan(Team& team, int32_t n, Op op, const Value& value, const Out& out) {
    const int32_t chunk = (n + team.size() - 1) / team.size();
    const int32_t begin = smaller(team.rank() * chunk, n), end = smaller(begin + chunk, n);
    int64_t own = 0;
    for (int32_t i = begin; i < end; ++i) own = op(own, value(i));
    team.partials()[team.rank()] = own;
    team.sync();
    int64_t before = 0, whole = 0;
    const int32_t num_chunks = chunk == 0 ? 0 : (n + chunk - 1) / chunk;
    for (int32_t other = 0; other < num_chunks; ++other) {
        if (other == team.rank()) before = whole;
        whole = op(whole, team.partials()[other]);
    }
    for (int32_t i = begin; i < end; ++i) {
        const int64_t here = value(i);
        out(i, before);
        before = op(before, here);
    }
    team.sync();
    return whole;
}

template <class Team, class Value>
MAGI_DEVICE int64_t team_sum(Team& team, int32_t n, const Value& value) {
    return team_scan(team, n, Sum{}, value, [](int32_t, int64_t) {});
}

template <class Item>
MAGI_DEVICE void order_pair(Item* items, int32_t n, int32_t low, int32_t high) {
    if (high >= n || !(items[high] < items[low])) return;
    const Item kept = items[low];
    items[low] = items[high];
    items[high] = kept;
}

// Ascending, in place, n <= 2^30. A bitonic network whose comparators all put the smaller item first: items past n would be the
// largest ones and stay where they are, so n need not be a power of two.
template <class Team, class Item>
MAGI_DEVICE void team_sort(Team& team, Item* items, int32_t n) {
    int32_t padded = 1;
    while (padded < n) padded <<= 1;
    for (int32_t size = 2; size <= padded; size <<= 1) {
        const int32_t half = size / 2;
        for (int32_t i = team.rank(); i < padded / 2; i += team.size()) {
            const int32_t within = i & (half - 1), first = (i - within) * 2;
            order_pair(items, n, first + within, first + size - 1 - within);
        }
        team.sync();
        for (int32_t step = half / 2; step > 0; step >>= 1) {
            for (int32_t i = team.rank(); i < padded / 2; i += team.size()) {
                const int32_t within = i & (step - 1), first = (i - within) * 2;
                order_pair(items, n, first + within, first + within + step);
            }
            team.sync();
        }
    }
}

// First i < n for which is_past(i), else n; is_past is false, then true. For one thread.
template <class Predicate>
MAGI_DEVICE int32_t first_past(int32_t n, const Predicate& is_past) {
    int32_t low = 0, high = n;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (is_past(middle))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

MAGI_DEVICE inline int32_t count_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __popc(bits);
#else
    return __builtin_popcount(bits);
#endif
}

}  // namespace magi
