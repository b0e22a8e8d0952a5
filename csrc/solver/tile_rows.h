// Which rows a tile owns: all tiles of one height, or tiles that begin where cuts say.
// Plain C++20; knows nothing of slices, columns or costs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "base/arrays.h"
#include "base/slice.h"

namespace magi {

class TileRows {
public:
    // cuts: empty (tile t begins at t * tile_rows), or the first row of each tile and then num_rows, which outlive this object.
    // Throws InputError for cuts that leave rows out or make a tile without rows or with more than tile_rows.
    TileRows(int64_t num_rows, int64_t tile_rows, std::span<const int32_t> cuts = {})
        : num_rows_(num_rows), tile_rows_(tile_rows), cuts_(cuts) {
        if (cuts.empty()) return;
        if (cuts.front() != 0 || cuts.back() != num_rows)
            throw InputError("cuts: from " + std::to_string(cuts.front()) + " to " + std::to_string(cuts.back()) +
                             ", must be from 0 to num_rows=" + std::to_string(num_rows));
        for (size_t tile = 0; tile + 1 < cuts.size(); ++tile) {
            const int64_t height = int64_t{cuts[tile + 1]} - cuts[tile];
            if (height < 1 || height > tile_rows)
                throw InputError("cuts: tile " + std::to_string(tile) + " has " + std::to_string(height) + " rows, must be from 1 to " +
                                 std::to_string(tile_rows));
        }
    }

    int64_t num_rows() const { return num_rows_; }
    int64_t tile_rows() const { return tile_rows_; }
    int64_t num_tiles() const { return cuts_.empty() ? (num_rows_ + tile_rows_ - 1) / tile_rows_ : static_cast<int64_t>(cuts_.size()) - 1; }

    int32_t begin(int64_t tile) const { return cuts_.empty() ? static_cast<int32_t>(tile * tile_rows_) : cut(tile); }
    int32_t end(int64_t tile) const {
        return cuts_.empty() ? static_cast<int32_t>(std::min((tile + 1) * tile_rows_, num_rows_)) : cut(tile + 1);
    }

    int64_t tile_of(int32_t row) const {
        if (cuts_.empty()) return row / tile_rows_;
        return std::upper_bound(cuts_.begin(), cuts_.end(), row) - cuts_.begin() - 1;
    }

private:
    int32_t cut(int64_t idx) const { return cuts_[static_cast<size_t>(idx)]; }

    int64_t num_rows_, tile_rows_;
    std::span<const int32_t> cuts_;
};

}  // namespace magi
