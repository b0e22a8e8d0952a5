// Tile sizes of the kernels, shared with whoever makes the work list. Plain C++.
#pragma once

namespace magi::sm90 {

inline constexpr int kForwardTileRows = 128;
inline constexpr int kForwardBlockCols = 128;
// Fewer, wider blocks: less read again from shared memory, more wasted at the edges of a mask. Only for head_dim 128 without softcap.
inline constexpr int kForwardWideCols = 160;
inline constexpr int kBackwardTileRows = 128;
inline constexpr int kBackwardBlockCols = 64;
inline constexpr int kDqTileRows = 128;
inline constexpr int kDqBlockCols = 64;

}  // namespace magi::sm90
