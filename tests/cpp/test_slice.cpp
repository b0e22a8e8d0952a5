// Slice algebra against dense brute force on small rectangles.
#include "base/slice.h"

#include "check.h"

using namespace magi;
using namespace magi::test;

namespace {

constexpr int32_t kQ = 9, kK = 11;

// The predicate of every cell in a frame larger than the ranges, so that moved slices stay inside.
template <class Predicate>
void for_each_cell(Predicate predicate) {
    for (int64_t i = -2; i < kQ + 2; ++i)
        for (int64_t j = -2; j < kK + 2; ++j) predicate(i, j);
}

void check_area_and_tighten(const Slice& s) {
    int64_t cells = 0, q_low = kQ, q_high = -1, k_low = kK, k_high = -1;
    for_each_cell([&](int64_t i, int64_t j) {
        if (!sees(s, i, j)) return;
        ++cells;
        q_low = std::min(q_low, i), q_high = std::max(q_high, i);
        k_low = std::min(k_low, j), k_high = std::max(k_high, j);
    });
    CHECK_EQUAL(area(s), cells);
    Slice tight = s;
    CHECK_EQUAL(tighten(tight), cells > 0);
    if (cells == 0) return;
    CHECK_EQUAL(area(tight), cells);
    CHECK(tight.q_start == q_low && tight.q_end == q_high + 1 && tight.k_start == k_low && tight.k_end == k_high + 1);
    for_each_cell([&](int64_t i, int64_t j) { CHECK_EQUAL(sees(tight, i, j), sees(s, i, j)); });
    Slice again = tight;
    CHECK(tighten(again) && again == tight);
}

void check_clip_move_transpose(const Slice& s, Random& random) {
    const auto q_low = static_cast<int32_t>(random.between(0, kQ)), q_high = static_cast<int32_t>(random.between(q_low, kQ));
    const auto k_low = static_cast<int32_t>(random.between(0, kK)), k_high = static_cast<int32_t>(random.between(k_low, kK));
    const Slice part = clip(s, q_low, q_high, k_low, k_high);
    const int64_t dq = random.between(-5, 5), dk = random.between(-5, 5);
    const Slice moved = move(s, dq, dk), mirrored = transpose(s);
    for_each_cell([&](int64_t i, int64_t j) {
        CHECK_EQUAL(sees(part, i, j), sees(s, i, j) && q_low <= i && i < q_high && k_low <= j && j < k_high);
        CHECK_EQUAL(sees(moved, i + dq, j + dk), sees(s, i, j));
        CHECK_EQUAL(sees(mirrored, j, i), sees(s, i, j));
    });
    CHECK_EQUAL(area(mirrored), area(s));
    CHECK_EQUAL(area(moved), area(s));
}

void check_intersect(const Slice& a, const Slice& b) {
    const Slice both = intersect(a, b);
    for_each_cell([&](int64_t i, int64_t j) { CHECK_EQUAL(sees(both, i, j), sees(a, i, j) && sees(b, i, j)); });
}

void check_extremes() {
    const auto top = static_cast<int32_t>(kMaxTokens);
    const Slice all{0, top, 0, top, -kUnbounded, kUnbounded};
    CHECK_EQUAL(area(all), kMaxTokens * kMaxTokens);
    const Slice causal{0, top, 0, top, -kUnbounded, 0};
    CHECK_EQUAL(area(causal), kMaxTokens * (kMaxTokens + 1) / 2);
    CHECK_EQUAL(area(Slice{}), 0);
    CHECK_EQUAL(area(Slice{3, 3, 0, 5}), 0);
    CHECK_EQUAL(area(Slice{0, 5, 0, 5, 2, 1}), 0);
    Slice tight = causal;
    CHECK(tighten(tight));
    CHECK(tight == causal);
    // Unbounded stays unbounded wherever the slice goes.
    CHECK_EQUAL(move(causal, 0, 7).lo, -kUnbounded);
}

}  // namespace

int main() {
    Random random(7);
    for (int round = 0; round < 4000; ++round) {
        const Slice s = random.slice(kQ, kK);
        check_area_and_tighten(s);
        check_clip_move_transpose(s, random);
        check_intersect(s, random.slice(kQ, kK));
    }
    check_extremes();
    return report("slice");
}
