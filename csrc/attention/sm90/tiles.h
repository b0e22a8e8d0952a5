// Tile sizes of the kernels, shared with whoever makes the work list. Plain C++.
#pragma once

namespace magi::sm90 {

inline constexpr int kForwardTileRows = 128;
inline constexpr int kForwardBlockCols = 128;
inline constexpr int kBackwardTileRows = 128;
inline constexpr int kBackwardBlockCols = 64;
inline constexpr int kDqTileRows = 128;
inline constexpr int kDqBlockCols = 64;

}  // namespace magi::sm90
