// Chunks joined to runs; knows nothing of how the owners were chosen.
#include "solver/ownership.h"

#include <algorithm>
#include <string>

#include "base/arrays.h"
#include "base/slice.h"

namespace magi {

Ownership::Ownership(std::span<const int32_t> chunk_owner, int64_t chunk_size, int64_t total_tokens, int64_t cp_size)
    : chunk_size_(chunk_size) {
    if (cp_size < 1) throw InputError("cp_size=" + std::to_string(cp_size) + " must be at least 1");
    if (chunk_size < 1) throw InputError("chunk_size=" + std::to_string(chunk_size) + " must be at least 1");
    if (total_tokens < 0 || total_tokens > kMaxTokens)
        throw InputError("total_tokens=" + std::to_string(total_tokens) + " is out of range");
    const int64_t num_chunks = (total_tokens + chunk_size - 1) / chunk_size;
    if (static_cast<int64_t>(chunk_owner.size()) != num_chunks)
        throw InputError("chunk_owner has " + std::to_string(chunk_owner.size()) + " chunks; " + std::to_string(total_tokens) +
                         " tokens in chunks of " + std::to_string(chunk_size) + " are " + std::to_string(num_chunks));
    std::vector<Intervals> owned(static_cast<size_t>(cp_size));
    std::vector<int32_t> num_rows(static_cast<size_t>(cp_size), 0);
    run_of_chunk_.reserve(chunk_owner.size());
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        const int32_t owner = chunk_owner[static_cast<size_t>(chunk)];
        if (owner < 0 || owner >= cp_size)
            throw InputError("chunk_owner[" + std::to_string(chunk) + "]=" + std::to_string(owner) + " is not a rank below " +
                             std::to_string(cp_size));
        const auto rank = static_cast<size_t>(owner);
        const auto start = static_cast<int32_t>(chunk * chunk_size);
        const auto end = static_cast<int32_t>(std::min((chunk + 1) * chunk_size, total_tokens));
        if (runs_.empty() || runs_.back().owner != owner) {
            runs_.push_back({start, start, owner, num_rows[rank]});
            owned[rank].push_back({start, start});
        }
        runs_.back().end = owned[rank].back().end = end;
        num_rows[rank] += end - start;
        run_of_chunk_.push_back(static_cast<int32_t>(runs_.size()) - 1);
    }
    rows_.reserve(owned.size());
    for (Intervals& runs : owned) rows_.emplace_back(std::move(runs));
}

size_t Ownership::run_at(int32_t token) const { return static_cast<size_t>(run_of_chunk_[static_cast<size_t>(token / chunk_size_)]); }

}  // namespace magi
