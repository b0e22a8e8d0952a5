// Tile sizes of the kernels, shared with whoever makes the work list. Plain C++.
#pragma once

namespace magi::sm90 {

inline constexpr int kForwardTileRows = 128;
inline constexpr int kForwardBlockCols = 128;
inline constexpr int kBackwardTileRows = 128;
constexpr int backward_block_cols(int head_dim) { return head_dim == 64 ? 128 : 64; }

}  // namespace magi::sm90
