// The whole test framework: a check that prints and counts, and fixed-seed random masks. Knows nothing of the code under test but Slice.
#pragma once

#include <cstdio>
#include <random>
#include <sstream>
#include <vector>

#include "base/slice.h"

namespace magi::test {

inline int num_failures = 0;

template <class A, class B>
void check_equal(const A& a, const B& b, const char* text, const char* file, int line) {
    if (a == b) return;
    std::ostringstream values;
    values << a << " != " << b;
    std::fprintf(stderr, "%s:%d: %s: %s\n", file, line, text, values.str().c_str());
    ++num_failures;
}

#define CHECK_EQUAL(a, b) ::magi::test::check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK(condition) ::magi::test::check_equal(static_cast<bool>(condition), true, #condition, __FILE__, __LINE__)

// Process status for main.
inline int report(const char* name) {
    std::printf("%s: %s (%d failures)\n", name, num_failures == 0 ? "ok" : "FAILED", num_failures);
    return num_failures == 0 ? 0 : 1;
}

class Random {
public:
    explicit Random(uint32_t seed) : engine_(seed) {}
    // Uniform enough in [low, high], the same on every standard library.
    int64_t between(int64_t low, int64_t high) { return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1)); }

    // Any band in [0, total_q) x [0, total_k), often cut by its rectangle, sometimes empty.
    Slice slice(int32_t total_q, int32_t total_k) {
        Slice s;
        s.q_start = static_cast<int32_t>(between(0, total_q));
        s.q_end = static_cast<int32_t>(between(s.q_start, total_q));
        s.k_start = static_cast<int32_t>(between(0, total_k));
        s.k_end = static_cast<int32_t>(between(s.k_start, total_k));
        if (between(0, 2) > 0) s.lo = static_cast<int32_t>(between(-total_q - 1, total_k + 1));
        if (between(0, 2) > 0) s.hi = static_cast<int32_t>(between(-total_q - 1, total_k + 1));
        return s;
    }

private:
    std::mt19937 engine_;
};

inline bool sees(const Slice& s, int64_t i, int64_t j) {
    return s.q_start <= i && i < s.q_end && s.k_start <= j && j < s.k_end && s.lo <= j - i && j - i <= s.hi;
}

// Documents of the given lengths, each causal.
inline std::vector<Slice> causal_documents(const std::vector<int32_t>& lengths) {
    std::vector<Slice> slices;
    int32_t start = 0;
    for (const int32_t length : lengths) {
        if (length > 0) slices.push_back({start, start + length, start, start + length, -kUnbounded, 0});
        start += length;
    }
    return slices;
}

}  // namespace magi::test
