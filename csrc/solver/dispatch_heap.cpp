// Chunks by falling area to lightly loaded ranks: dealt in turn, by a heap, or by a heap that looks at shared keys.
// Balance only; local_search.h improves what comes out.
#include <bit>
#include <queue>
#include <set>
#include <tuple>

#include "solver/dispatch.h"
#include "solver/remote_rows.h"

namespace magi {

namespace {

std::vector<int32_t> chunks_by_falling_area(const DispatchDesc& desc) {
    std::vector<int32_t> order(desc.num_chunks());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return desc.areas[a] > desc.areas[b]; });
    return order;
}

// Who may still take a chunk.
class TokenBudget {
public:
    TokenBudget(const DispatchDesc& desc, int64_t max_tokens)
        : desc_(desc), max_tokens_(max_tokens), max_chunks_(desc.is_even ? desc.num_chunks() / desc.cp_size : desc.num_chunks()) {
        tokens_.resize(desc.cp_size);
        chunks_.resize(desc.cp_size);
    }
    bool has_room(int32_t rank, int32_t chunk) const {
        return chunks_[rank] < max_chunks_ && (desc_.is_even || tokens_[rank] + desc_.grid.tokens(chunk) <= max_tokens_);
    }
    void take(int32_t rank, int32_t chunk) {
        tokens_[rank] += desc_.grid.tokens(chunk);
        ++chunks_[rank];
    }
    bool is_full(int32_t rank) const { return chunks_[rank] >= max_chunks_; }
    int64_t tokens(int32_t rank) const { return tokens_[rank]; }

private:
    const DispatchDesc& desc_;
    int64_t max_tokens_, max_chunks_;
    std::vector<int64_t> tokens_, chunks_;
};

using Load = std::tuple<int64_t, int64_t, int32_t>;  // load, second load, rank
using MinHeap = std::priority_queue<Load, std::vector<Load>, std::greater<>>;

// The chunks of order[first..] to the ranks with the fewest tokens.
void spread_by_tokens(const DispatchDesc& desc, std::span<const int32_t> order, TokenBudget& budget, Owners& owner) {
    MinHeap heap;
    for (int32_t rank = 0; rank < desc.cp_size; ++rank)
        if (!budget.is_full(rank)) heap.emplace(budget.tokens(rank), 0, rank);
    for (const int32_t chunk : order) {
        const int32_t rank = std::get<2>(heap.top());
        heap.pop();
        owner[chunk] = rank;
        budget.take(rank, chunk);
        if (!budget.is_full(rank)) heap.emplace(budget.tokens(rank), 0, rank);
    }
}

}  // namespace

Owners sorted_sequential_owners(const DispatchDesc& desc) {
    Owners owner(desc.num_chunks());
    int64_t turn = 0;
    for (const int32_t chunk : chunks_by_falling_area(desc)) owner[chunk] = static_cast<int32_t>(turn++ % desc.cp_size);
    return owner;
}

Owners heap_owners(const DispatchDesc& desc, int64_t max_tokens) {
    const std::vector<int32_t> order = chunks_by_falling_area(desc);
    Owners owner(desc.num_chunks());
    TokenBudget budget(desc, max_tokens);
    MinHeap heap;
    for (int32_t rank = 0; rank < desc.cp_size; ++rank) heap.emplace(0, 0, rank);
    size_t next = 0;
    for (; next < order.size() && desc.areas[order[next]] > 0; ++next) {
        const int32_t chunk = order[next];
        while (!heap.empty() && !budget.has_room(std::get<2>(heap.top()), chunk)) heap.pop();
        if (heap.empty()) break;
        const auto [area, tokens, rank] = heap.top();
        heap.pop();
        owner[chunk] = rank;
        budget.take(rank, chunk);
        heap.emplace(area + desc.areas[chunk], budget.tokens(rank), rank);
    }
    spread_by_tokens(desc, std::span(order).subspan(next), budget, owner);
    return owner;
}

Owners topp_heap_owners(const DispatchDesc& desc, int64_t max_tokens, int64_t top_p_ppm) {
    constexpr int64_t kMaxLookedAt = 16;  // bounds the work on a thousand ranks
    const std::vector<int32_t> order = chunks_by_falling_area(desc);
    const int64_t looked_at = std::clamp<int64_t>((desc.cp_size * top_p_ppm + 999999) / 1000000, 1, kMaxLookedAt);
    // One bit per rank and cell of keys: does the rank need some of it already? Cells are chunks until looking gets long.
    constexpr int64_t kWordsLookedAt = int64_t{1} << 28, kMinWords = 16;
    const int64_t max_words = std::max(kMinWords, kWordsLookedAt / std::max<int64_t>(1, desc.num_chunks() * looked_at));
    const ChunkGrid cells = key_cells(*desc.needs, desc.grid, max_words * 64);
    const int64_t words = (cells.num_chunks() + 63) / 64;
    std::vector<uint64_t> needed(words * desc.cp_size, 0);
    const auto for_each_word = [&](int32_t chunk, auto visit) {
        for (const Interval need : desc.needs->of(chunk)) {
            const int64_t first = need.start / cells.chunk_size, last = (need.end - 1) / cells.chunk_size;
            for (int64_t word = first / 64; word <= last / 64; ++word) {
                const uint64_t low = word == first / 64 ? ~uint64_t{0} << (first % 64) : ~uint64_t{0};
                const uint64_t high = word == last / 64 ? ~uint64_t{0} >> (63 - last % 64) : ~uint64_t{0};
                visit(word, low & high);
            }
        }
    };

    Owners owner(desc.num_chunks());
    TokenBudget budget(desc, max_tokens);
    std::set<std::pair<int64_t, int32_t>> ranks;
    for (int32_t rank = 0; rank < desc.cp_size; ++rank) ranks.emplace(0, rank);
    size_t next = 0;
    for (; next < order.size() && desc.areas[order[next]] > 0; ++next) {
        const int32_t chunk = order[next];
        auto best = ranks.end();
        int64_t best_shared = -1, seen = 0;
        for (auto it = ranks.begin(); it != ranks.end() && seen < looked_at;) {
            if (!budget.has_room(it->second, chunk)) {
                it = ranks.erase(it);
                continue;
            }
            int64_t shared = 0;
            const uint64_t* bits = needed.data() + it->second * words;
            for_each_word(chunk, [&](int64_t word, uint64_t mask) { shared += std::popcount(bits[word] & mask); });
            if (shared > best_shared) best = it, best_shared = shared;
            ++it;
            ++seen;
        }
        if (best == ranks.end()) break;
        const auto [area, rank] = *best;
        ranks.erase(best);
        owner[chunk] = rank;
        budget.take(rank, chunk);
        for_each_word(chunk, [&, rank = rank](int64_t word, uint64_t mask) { needed[rank * words + word] |= mask; });
        ranks.emplace(area + desc.areas[chunk], rank);
    }
    spread_by_tokens(desc, std::span(order).subspan(next), budget, owner);
    return owner;
}

}  // namespace magi
