// Which columns of one block each row of a thread sees, as bits, from the pieces of an edge block. Knows nothing of softmax or loads.
#pragma once

#include <cstdint>

#include "attention/work.h"
#include "ptx/barrier.cuh"
#include "ptx/warpgroup.cuh"

namespace magi {

// What the load warp tells the others of one block; travels through shared memory beside the block itself.
struct alignas(16) Block {
    int32_t col_begin;
    int32_t flags;                   // number of columns that exist (some row sees them) | the bits below | head << 16
    int32_t piece_begin, piece_end;  // equal: every row sees every column

    static constexpr int32_t kLast = 1 << 8;
    // Told by the backward alone, which has no registers to keep more of a block than its flags.
    static constexpr int kStartBits = 9;  // col_begin % 4 in two bits
    static constexpr int32_t kOddStart = 1 << kStartBits;
    static constexpr int32_t kEdge = 1 << 11;
    static constexpr int32_t kShort = 1 << 12;  // the tile has fewer rows than a tile can have
    __device__ __forceinline__ int num_cols() const { return flags & 0xFF; }
    __device__ __forceinline__ int head() const { return static_cast<int>(static_cast<uint32_t>(flags) >> 16); }
    __device__ __forceinline__ bool is_last() const { return (flags & kLast) != 0; }
    __device__ __forceinline__ bool is_edge() const { return piece_begin != piece_end; }
};

// A block in shared memory, with its pieces where they are as few as nearly always: reading them later would be a wait in the open.
struct BlockSlot {
    static constexpr int kPieces = 2;
    Block block;
    int2 pieces[kPieces][3];

    // By the thread that loads.
    __device__ __forceinline__ void set(const Block& value, const WorkPiece* __restrict__ from) {
        block = value;
        const int num_pieces = value.piece_end - value.piece_begin;
        if (num_pieces == 0 || num_pieces > kPieces) return;
        const uint32_t to = ptx::shared_address(pieces);
#pragma unroll 1
        for (int part = 0; part < 3 * num_pieces; ++part)
            ptx::copy_8_bytes(to + 8 * part, reinterpret_cast<const int2*>(from + value.piece_begin) + part);
        ptx::wait_copies();
    }
};

// Visible columns of kRows rows in a block of 32 * kWords columns, bit c of word w = column 32 w + c.
template <int kRows, int kWords>
struct ColumnBits {
    uint32_t word[kRows][kWords];
};

// The columns of one piece that rows `row` and `row + 8` see.
template <int kWords>
__device__ __forceinline__ void add_piece(ColumnBits<2, kWords>& bits, const WorkPiece& piece, int row, int col_begin) {
    // hi may be 2^30 (unbounded); one less sees the same columns and row + hi + 1 stays inside int32.
    const int hi = min(piece.hi, (1 << 30) - 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = row + 8 * r;
        const bool inside = i >= piece.row_begin && i < piece.row_end;
        const int first = max(piece.col_begin, i + piece.lo) - col_begin;
        const int end = inside ? min(piece.col_end, i + hi + 1) - col_begin : 0;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            const int a = min(max(first - 32 * w, 0), 32);
            const int width = max(min(end - 32 * w, 32) - a, 0);
            bits.word[r][w] |= ptx::bit_range(static_cast<uint32_t>(a), static_cast<uint32_t>(width));
        }
    }
}

// Bits of the rows that a thread of a wgmma accumulator holds when columns run along the accumulator's columns. All lanes of a
// warp must call it; the warp's 16 rows start at warp_row. Many pieces are looked at 32 at a time: those that miss cost one vote.
template <int kWords>
__device__ __forceinline__ ColumnBits<2, kWords> visible_columns(const WorkPiece* __restrict__ pieces, const BlockSlot& slot,
                                                                 const Block& block, int warp_row, int lane) {
    ColumnBits<2, kWords> bits;
#pragma unroll
    for (int w = 0; w < kWords; ++w) bits.word[0][w] = bits.word[1][w] = 0;
    const int row = warp_row + lane / 4;
    const int num_pieces = block.piece_end - block.piece_begin;
    if (num_pieces <= BlockSlot::kPieces) {
#pragma unroll 1
        for (int idx = 0; idx < num_pieces; ++idx) {
            const int2 rows = slot.pieces[idx][0], cols = slot.pieces[idx][1], band = slot.pieces[idx][2];
            add_piece<kWords>(bits, {rows.x, rows.y, cols.x, cols.y, band.x, band.y}, row, block.col_begin);
        }
        return bits;
    }
    const int col_end = block.col_begin + 32 * kWords;
#pragma unroll 1
    for (int base = block.piece_begin; base < block.piece_end; base += 32) {
        WorkPiece piece{};
        const int mine = base + lane;
        if (mine < block.piece_end) {
            const int2* from = reinterpret_cast<const int2*>(pieces + mine);
            const int2 rows = __ldg(from), cols = __ldg(from + 1), band = __ldg(from + 2);
            piece = {rows.x, rows.y, cols.x, cols.y, band.x, band.y};
        }
        const bool touches = mine < block.piece_end && piece.row_begin < warp_row + 16 && piece.row_end > warp_row &&
                             piece.col_begin < col_end && piece.col_end > block.col_begin;
#pragma unroll 1
        for (uint32_t left = __ballot_sync(~0u, touches); left != 0; left &= left - 1) {
            const int from = __ffs(static_cast<int>(left)) - 1;
            const WorkPiece shared_piece = {__shfl_sync(~0u, piece.row_begin, from), __shfl_sync(~0u, piece.row_end, from),
                                            __shfl_sync(~0u, piece.col_begin, from), __shfl_sync(~0u, piece.col_end, from),
                                            __shfl_sync(~0u, piece.lo, from),        __shfl_sync(~0u, piece.hi, from)};
            add_piece<kWords>(bits, shared_piece, row, block.col_begin);
        }
    }
    return bits;
}

// scores[4 j + 2 r + p] is row r, column 8 j + 2 (lane % 4) + p: those not visible become `hidden`.
template <int kWords, int N>
__device__ __forceinline__ void hide_columns(float (&scores)[N], const ColumnBits<2, kWords>& bits, int lane, float hidden) {
    static_assert(N == 32 * kWords / 2);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint32_t own = bits.word[r][w] >> (2 * (lane % 4));
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#pragma unroll
                for (int p = 0; p < 2; ++p) {
                    float& score = scores[4 * (4 * w + j) + 2 * r + p];
                    score = (own & (1u << (8 * j + p))) ? score : hidden;
                }
            }
        }
    }
}

// Whether a lane sees score 4 j + 2 r + p of such an accumulator.
template <int kWords>
__device__ __forceinline__ bool sees(const ColumnBits<2, kWords>& bits, int j, int r, int p, int lane) {
    return (bits.word[r][j / 4] >> (8 * (j % 4) + 2 * (lane % 4) + p)) & 1;
}

}  // namespace magi
