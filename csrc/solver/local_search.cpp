// Moves and swaps of single chunks. Knows nothing of where the start assignment came from.
#include "solver/local_search.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "solver/remote_rows.h"

namespace magi {

namespace {

// One exchange between the fullest rank and a light one: `give` leaves the fullest, `take` (-1: none) comes back.
struct Trade {
    int64_t largest = 0;      // larger area of the two ranks afterwards
    int64_t over = 0;         // the same, but not below the target: trades that reach it are equally good
    int32_t new_borders = 0;  // run borders added
    int32_t partner = -1, give = -1, take = -1;

    auto cost() const { return std::tuple(over, new_borders, largest); }
};

// Chunks by rising area, then id.
struct BySize {
    const std::vector<int64_t>& areas;
    bool operator()(int32_t a, int32_t b) const { return std::pair(areas[a], a) < std::pair(areas[b], b); }
};

class BalanceSearch {
public:
    BalanceSearch(const DispatchDesc& desc, int64_t target_area, int64_t max_tokens, int64_t max_work, Owners& owner)
        : desc_(desc), owner_(owner), loads_(rank_loads(desc, owner)), max_tokens_(max_tokens), work_left_(max_work) {
        target_area_ = std::max(target_area, desc.areas.empty() ? 0 : *std::max_element(desc.areas.begin(), desc.areas.end()));
        by_area_.resize(desc.cp_size);
        for (int32_t chunk = 0; chunk < desc.num_chunks(); ++chunk) by_area_[owner[chunk]].push_back(chunk);
        for (auto& chunks : by_area_) std::sort(chunks.begin(), chunks.end(), BySize{desc_.areas});
        for (int32_t rank = 0; rank < desc.cp_size; ++rank) by_load_.emplace(loads_.area[rank], rank);
    }

    void run() {
        while (work_left_ > 0) {
            const int64_t largest = by_load_.rbegin()->first;
            if (largest <= target_area_) return;
            const int32_t fullest = by_load_.lower_bound({largest, 0})->second;
            Trade best{largest, largest};
            // The lightest ranks first; more of them only when these cannot help.
            auto light = by_load_.begin();
            int64_t looked_at = 0;
            for (int64_t partners = 8; best.partner < 0 && work_left_ > 0 && light->first < largest; partners *= 8)
                for (; looked_at < partners && light->first < largest; ++looked_at, ++light) look_at(fullest, light->second, best);
            if (best.partner < 0) return;
            apply(fullest, best);
        }
    }

private:
    bool tokens_allow(int32_t partner, int64_t gained) const {
        return gained <= 0 || desc_.is_even || loads_.tokens[partner] + gained <= max_tokens_;
    }

    // Run borders that appear (or, negative, vanish) when `chunk` goes from its owner to `to`.
    int32_t border_change(int32_t chunk, int32_t to) const {
        int32_t change = 0;
        for (const int32_t neighbour : {chunk - 1, chunk + 1}) {
            if (neighbour < 0 || neighbour >= desc_.num_chunks()) continue;
            change += (owner_[neighbour] != to) - (owner_[neighbour] != owner_[chunk]);
        }
        return change;
    }

    void consider(int32_t fullest, int32_t partner, int32_t give, int32_t take, Trade& best) const {
        const int64_t shift = desc_.areas[give] - (take < 0 ? 0 : desc_.areas[take]);
        Trade trade{.largest = std::max(loads_.area[fullest] - shift, loads_.area[partner] + shift),
                    .partner = partner,
                    .give = give,
                    .take = take};
        trade.over = std::max(trade.largest, target_area_);
        if (shift <= 0 || trade.largest >= loads_.area[fullest] || trade.over > best.over) return;
        const int64_t gained = desc_.grid.tokens(give) - (take < 0 ? 0 : desc_.grid.tokens(take));
        if (!tokens_allow(partner, gained) || !tokens_allow(fullest, -gained)) return;
        trade.new_borders = border_change(give, partner) + (take < 0 ? 0 : border_change(take, fullest));
        if (best.partner < 0 || trade.cost() < best.cost()) best = trade;
    }

    static constexpr size_t kAround = 4;

    // The best shift is half the difference: for each chunk given, the chunks of the partner around (its area - half).
    void look_at(int32_t fullest, int32_t partner, Trade& best) {
        const std::vector<int32_t>& ours = by_area_[fullest];
        const std::vector<int32_t>& theirs = by_area_[partner];
        const int64_t half = (loads_.area[fullest] - loads_.area[partner]) / 2;
        size_t at = 0;
        for (const int32_t give : ours) {
            if (!desc_.is_even) consider(fullest, partner, give, -1, best);
            while (at < theirs.size() && desc_.areas[theirs[at]] < desc_.areas[give] - half) ++at;
            // Around it, only what leaves both ranks no fuller than the best trade so far does.
            const int64_t smallest = desc_.areas[give] - (best.over - loads_.area[partner]);
            const int64_t largest = desc_.areas[give] - (loads_.area[fullest] - best.over);
            size_t first = at, last = at;
            while (first > 0 && at - first < kAround && desc_.areas[theirs[first - 1]] >= smallest) --first;
            while (last < theirs.size() && last - at < kAround && desc_.areas[theirs[last]] <= largest) ++last;
            for (size_t i = first; i < last; ++i) consider(fullest, partner, give, theirs[i], best);
        }
        work_left_ -= static_cast<int64_t>(ours.size() + theirs.size());
    }

    void transfer(int32_t chunk, int32_t from, int32_t to) {
        auto& source = by_area_[from];
        source.erase(std::lower_bound(source.begin(), source.end(), chunk, BySize{desc_.areas}));
        auto& target = by_area_[to];
        target.insert(std::lower_bound(target.begin(), target.end(), chunk, BySize{desc_.areas}), chunk);
        add_area(from, -desc_.areas[chunk]);
        add_area(to, desc_.areas[chunk]);
        loads_.tokens[from] -= desc_.grid.tokens(chunk);
        loads_.tokens[to] += desc_.grid.tokens(chunk);
        owner_[chunk] = to;
    }

    void add_area(int32_t rank, int64_t area) {
        by_load_.erase({loads_.area[rank], rank});
        loads_.area[rank] += area;
        by_load_.emplace(loads_.area[rank], rank);
    }

    void apply(int32_t fullest, const Trade& trade) {
        transfer(trade.give, fullest, trade.partner);
        if (trade.take >= 0) transfer(trade.take, trade.partner, fullest);
    }

    const DispatchDesc& desc_;
    Owners& owner_;
    RankLoads loads_;
    int64_t target_area_ = 0, max_tokens_, work_left_;
    std::vector<std::vector<int32_t>> by_area_;      // chunks of each rank, ascending area
    std::set<std::pair<int64_t, int32_t>> by_load_;  // (area, rank)
};

class LocalitySearch {
public:
    LocalitySearch(const DispatchDesc& desc, const BalanceLimits& limits, int64_t max_work, Owners& owner)
        : desc_(desc), owner_(owner), loads_(rank_loads(desc, owner)), work_left_(max_work) {
        max_area_ = std::max(limits.max_area, loads_.max_area);
        max_tokens_ = std::max(limits.max_tokens, loads_.max_tokens);
        const RankChunks by_rank = chunks_by_rank(owner, desc.cp_size);
        chunks_.resize(desc.cp_size);
        rows_.resize(desc.cp_size);
        for (int32_t rank = 0; rank < desc.cp_size; ++rank) {
            chunks_[rank].assign(by_rank.of(rank).begin(), by_rank.of(rank).end());
            rows_[rank] = count(rank);
        }
    }

    void run() {
        const int64_t n = desc_.num_chunks();
        bool improved = true;
        while (improved && work_left_ > 0) {
            improved = false;
            for (int32_t chunk = 0; chunk < n && work_left_ > 0; ++chunk) {
                for (const int32_t neighbour : {chunk - 1, chunk + 1}) {
                    if (neighbour < 0 || neighbour >= n || owner_[neighbour] == owner_[chunk]) continue;
                    improved |= bring(chunk, owner_[neighbour]);
                }
            }
        }
    }

private:
    int64_t count(int32_t rank) {
        const int64_t rows = remote_rows_of_rank(desc_.grid, *desc_.needs, chunks_[rank], desc_.owns_keys, scratch_);
        work_left_ -= static_cast<int64_t>(chunks_[rank].size());
        for (const int32_t chunk : chunks_[rank]) work_left_ -= static_cast<int64_t>(desc_.needs->of(chunk).size());
        return rows;
    }

    // Tries to bring `chunk` to rank `to`, paying with a chunk of `to` that has a neighbour at the present owner, or with nothing.
    bool bring(int32_t chunk, int32_t to) {
        const int32_t from = owner_[chunk];
        if (!desc_.is_even && trade(chunk, -1, from, to)) return true;
        constexpr int kTries = 4;
        int tries = 0;
        const std::vector<int32_t> candidates = chunks_[to];
        for (const int32_t back : candidates) {
            const bool touches_from = (back > 0 && owner_[back - 1] == from) || (back + 1 < desc_.num_chunks() && owner_[back + 1] == from);
            if (!touches_from || !fits(chunk, back, from, to)) continue;
            if (trade(chunk, back, from, to)) return true;
            if (++tries == kTries || work_left_ <= 0) break;
        }
        return false;
    }

    bool fits(int32_t chunk, int32_t back, int32_t from, int32_t to) const {
        const int64_t area = desc_.areas[chunk] - (back < 0 ? 0 : desc_.areas[back]);
        const int64_t tokens = desc_.grid.tokens(chunk) - (back < 0 ? 0 : desc_.grid.tokens(back));
        return loads_.area[to] + area <= max_area_ && loads_.area[from] - area <= max_area_ && loads_.tokens[to] + tokens <= max_tokens_ &&
               loads_.tokens[from] - tokens <= max_tokens_;
    }

    bool trade(int32_t chunk, int32_t back, int32_t from, int32_t to) {
        if (!fits(chunk, back, from, to)) return false;
        const int64_t larger_before = std::max(loads_.area[from], loads_.area[to]);
        hand_over(chunk, from, to);
        if (back >= 0) hand_over(back, to, from);
        const int64_t rows_from = count(from), rows_to = count(to);
        const int64_t saved = rows_[from] + rows_[to] - rows_from - rows_to;
        const int64_t growth = std::max(loads_.area[from], loads_.area[to]) - larger_before;
        if (saved > 0 && saved * kPairsPerRow >= growth) {
            rows_[from] = rows_from;
            rows_[to] = rows_to;
            return true;
        }
        hand_over(chunk, to, from);
        if (back >= 0) hand_over(back, from, to);
        return false;
    }

    void hand_over(int32_t chunk, int32_t from, int32_t to) {
        auto& source = chunks_[from];
        source.erase(std::lower_bound(source.begin(), source.end(), chunk));
        auto& target = chunks_[to];
        target.insert(std::lower_bound(target.begin(), target.end(), chunk), chunk);
        owner_[chunk] = to;
        loads_.area[from] -= desc_.areas[chunk];
        loads_.area[to] += desc_.areas[chunk];
        loads_.tokens[from] -= desc_.grid.tokens(chunk);
        loads_.tokens[to] += desc_.grid.tokens(chunk);
    }

    const DispatchDesc& desc_;
    Owners& owner_;
    RankLoads loads_;
    int64_t max_area_ = 0, max_tokens_ = 0, work_left_;
    std::vector<std::vector<int32_t>> chunks_;  // ascending ids of each rank
    std::vector<int64_t> rows_;                 // remote rows of each rank
    Intervals scratch_;
};

}  // namespace

void balance_search(const DispatchDesc& desc, int64_t target_area, int64_t max_tokens, int64_t max_work, Owners& owner) {
    BalanceSearch(desc, target_area, max_tokens, max_work, owner).run();
}

void locality_search(const DispatchDesc& desc, const BalanceLimits& limits, int64_t max_work, Owners& owner) {
    LocalitySearch(desc, limits, max_work, owner).run();
}

}  // namespace magi
