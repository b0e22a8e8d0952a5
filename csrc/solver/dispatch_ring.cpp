// Balances two loads at once, area and tokens, with few runs per rank.
//
// Close the tokens to a ring. Among all windows with half of its tokens the average area is half of the total, and area changes little
// from one window to the next, so some window has (nearly) half of both: give it to half of the ranks, the rest to the others, and
// split both parts again as rings of their own. Each split adds at most two cuts, so R ranks own at most 2R - 1 runs together, and
// the whole costs chunks * log R. (The ring argument of necklace splitting, done on a grid.) One causal document becomes a zigzag;
// a window mask becomes contiguous; packed documents are cut between documents where they can be.
// Among the windows that balance, the one whose cuts carry few key rows at a small miss of the share is taken.
#include <numeric>

#include "solver/dispatch.h"
#include "solver/remote_rows.h"

namespace magi {

namespace {

struct Window {
    int64_t start = -1, end = -1;  // positions on the ring of remaining chunks
    int64_t rows = 0;              // estimated key rows over its two cuts
    int64_t miss = 0;              // distance of its area from the share
};

bool is_better(const Window& a, const Window& b) { return b.start < 0 || a.rows * kPairsPerRow + a.miss < b.rows * kPairsPerRow + b.miss; }

// What a window should hold: area and tokens, or chunks when every rank must own the same number.
struct Share {
    int64_t area, min_area, max_area;
    int64_t tokens, min_tokens, max_tokens;
    int64_t chunks;  // 0: free
};

class Ring {
public:
    Ring(const DispatchDesc& desc, const BalanceLimits& limits)
        : desc_(desc), limits_(limits), border_(border_rows(desc.grid, *desc.needs, desc.owns_keys)) {}

    Owners run() {
        Owners owner(desc_.num_chunks(), 0);
        std::vector<int32_t> all(desc_.num_chunks());
        std::iota(all.begin(), all.end(), 0);
        split(std::move(all), 0, desc_.cp_size, owner);
        return owner;
    }

private:
    // Gives the ring of the ascending `chunks` to the ranks [first_rank, first_rank + ranks). Depth log2 R.
    void split(std::vector<int32_t> chunks, int32_t first_rank, int32_t ranks, Owners& owner) {
        if (ranks == 1 || chunks.empty()) {
            for (const int32_t chunk : chunks) owner[chunk] = first_rank;
            return;
        }
        ring_ = std::move(chunks);
        unroll();
        const int32_t inside = ranks / 2;
        const Share share = share_of(inside, ranks);
        Window window = cheapest_window(share);
        if (window.start < 0) window = nearest_window(share);
        // Positions past the end continue at 0.
        const int64_t n = size(), wrapped = std::max<int64_t>(0, window.end - n), end = std::min(window.end, n);
        std::vector<int32_t> taken(ring_.begin(), ring_.begin() + wrapped);
        taken.insert(taken.end(), ring_.begin() + window.start, ring_.begin() + end);
        std::vector<int32_t> rest(ring_.begin() + wrapped, ring_.begin() + window.start);
        rest.insert(rest.end(), ring_.begin() + end, ring_.end());
        split(std::move(taken), first_rank, inside, owner);
        split(std::move(rest), first_rank + inside, ranks - inside, owner);
    }

    int64_t size() const { return static_cast<int64_t>(ring_.size()); }

    // Prefix sums and cut costs along two turns of the ring.
    void unroll() {
        const int64_t n = size();
        area_.resize(2 * n + 1);
        tokens_.resize(2 * n + 1);
        cut_.resize(2 * n + 1);
        area_[0] = tokens_[0] = 0;
        for (int64_t at = 0; at < n; ++at) {
            const int32_t chunk = ring_[at];
            area_[at + 1] = area_[at] + desc_.areas[chunk];
            tokens_[at + 1] = tokens_[at] + desc_.grid.tokens(chunk);
            const bool is_cut_already = at == 0 || chunk != ring_[at - 1] + 1;
            cut_[at] = cut_[at + n] = is_cut_already ? 0 : border_[chunk];
        }
        cut_[2 * n] = 0;
        for (int64_t at = 1; at <= n; ++at) {
            area_[n + at] = area_[n] + area_[at];
            tokens_[n + at] = tokens_[n] + tokens_[at];
        }
    }

    // The same absolute slack at every split: its effect on one rank halves with each level above, so all levels together stay
    // within twice the last one.
    Share share_of(int64_t inside, int64_t ranks) const {
        const auto part = [&](int64_t total) { return total / ranks * inside + total % ranks * inside / ranks; };
        const int64_t area_slack = limits_.mean_area * 7 / 1000;
        const int64_t tokens_slack = (limits_.max_tokens - limits_.mean_tokens) / 2;
        Share share;
        share.area = part(area_[size()]);
        share.min_area = share.area - area_slack;
        share.max_area = share.area + area_slack;
        share.tokens = part(tokens_[size()]);
        share.min_tokens = share.tokens - tokens_slack;
        share.max_tokens = share.tokens + tokens_slack;
        share.chunks = desc_.is_even ? size() / ranks * inside : 0;
        return share;
    }

    Window window_at(int64_t start, int64_t end, const Share& share) const {
        const int64_t miss = area_[end] - area_[start] - share.area;
        return {start, end, cut_[start] + cut_[end], miss < 0 ? -miss : miss};
    }

    // For each start the admissible ends are one range that only moves right: a sliding minimum finds the cheapest cut in it.
    // The end nearest to the share is the other candidate.
    Window cheapest_window(const Share& share) {
        const int64_t n = size();
        Window best;
        int64_t area_low = 0, area_near = 0, area_high = 0, tokens_low = 0, tokens_high = 0, pushed = 0;
        cheap_.clear();  // ends in the range with rising cut cost, from cheap_[front] on
        size_t front = 0;
        for (int64_t start = 0; start < n; ++start) {
            const int64_t last = start + n;
            while (area_low < last && area_[area_low] - area_[start] < share.min_area) ++area_low;
            while (area_near < last && area_[area_near] - area_[start] < share.area) ++area_near;
            while (area_high < last && area_[area_high + 1] - area_[start] <= share.max_area) ++area_high;
            if (share.chunks > 0) {
                tokens_low = tokens_high = start + share.chunks;
            } else {
                while (tokens_low < last && tokens_[tokens_low] - tokens_[start] < share.min_tokens) ++tokens_low;
                while (tokens_high < last && tokens_[tokens_high + 1] - tokens_[start] <= share.max_tokens) ++tokens_high;
            }
            const int64_t low = std::max({area_low, tokens_low, start + 1}), high = std::min(area_high, tokens_high);
            for (pushed = std::max(pushed, low); pushed <= high; ++pushed) {
                while (cheap_.size() > front && cut_[cheap_.back()] > cut_[pushed]) cheap_.pop_back();
                cheap_.push_back(pushed);
            }
            while (front < cheap_.size() && cheap_[front] < low) ++front;
            if (low > high || front == cheap_.size()) continue;
            for (const int64_t end : {cheap_[front], std::clamp(area_near, low, high)}) {
                const Window window = window_at(start, end, share);
                if (is_better(window, best)) best = window;
            }
        }
        return best;
    }

    // When no window keeps the bounds (coarse chunks): equal tokens, area as near as possible.
    Window nearest_window(const Share& share) const {
        const int64_t n = size();
        Window best;
        int64_t end = 0;
        for (int64_t start = 0; start < n; ++start) {
            end = std::max(end, start + 1);
            if (share.chunks > 0)
                end = start + share.chunks;
            else
                while (end < start + n && tokens_[end] - tokens_[start] < share.tokens) ++end;
            const Window window = window_at(start, end, share);
            if (best.start < 0 || window.miss < best.miss || (window.miss == best.miss && window.rows < best.rows)) best = window;
        }
        return best;
    }

    const DispatchDesc& desc_;
    const BalanceLimits& limits_;
    std::vector<int64_t> border_;               // cost of a cut before each chunk
    std::vector<int32_t> ring_;                 // ascending chunks of the part being split
    std::vector<int64_t> area_, tokens_, cut_;  // along two turns
    std::vector<int64_t> cheap_;
};

}  // namespace

Owners ring_cut_owners(const DispatchDesc& desc, const BalanceLimits& limits) { return Ring(desc, limits).run(); }

}  // namespace magi
