// The device planner: slices, then per tile counts, then places and order of all tiles, then the records. Four launches on the stream.
// Knows nothing of heads or of how attention walks the list; what a tile's segments are is in tile_segments.h.
#include "attention/device_work.h"

#include <cuda_runtime.h>

#include <string>

#include "attention/device_slices.h"
#include "attention/sm90/host.h"
#include "attention/tile_segments.h"

namespace magi {

namespace {

constexpr int kTileThreads = 128;
constexpr int kPlaceThreads = 256;
constexpr int kTilesPerPlaceBlock = kPlaceThreads / 32;

struct CtaTeam {
    int64_t* partials_;
    __device__ __forceinline__ int32_t rank() const { return static_cast<int32_t>(threadIdx.x); }
    __device__ __forceinline__ int32_t size() const { return static_cast<int32_t>(blockDim.x); }
    __device__ __forceinline__ int32_t lane() const { return static_cast<int32_t>(threadIdx.x % 32); }
    __device__ __forceinline__ int32_t width() const { return 32; }
    __device__ __forceinline__ uint32_t ballot(bool vote) const { return __ballot_sync(~0u, vote); }
    __device__ __forceinline__ int64_t* partials() const { return partials_; }
    __device__ __forceinline__ void sync() const { __syncthreads(); }
};

// The workspace as pointers.
struct Workspace {
    int32_t* header;
    int32_t* order;
    int32_t* segment_offsets;
    WorkSegment* segments;
    WorkPiece* pieces;
    Slice* slices;                  // [num_slices] tight, rows of tiles as queries; empty ones have no rows
    int2* rows;                     // [num_slices] their rows again: all that most tiles read of most slices
    int32_t* num_segments;          // [num_tiles]
    int32_t* num_pieces;            // [num_tiles] saturated at INT32_MAX, which no capacity reaches
    int32_t* costs;                 // [num_tiles]
    int32_t* piece_begin;           // [num_tiles]
    int32_t* pool_begin;            // [num_tiles] of tiles with more than kSharedPieces pieces
    int32_t* block_status;          // [kMaxStatusBlocks]
    unsigned long long* pool_used;  // pieces that tiles asked for
    int32_t* pool;
    int64_t capacity_segments, capacity_pieces, capacity_pool;
    int32_t num_slices, num_tiles, num_rows, tile_rows, block_cols, shared_pieces, num_status_blocks;
};

Workspace workspace_of(const DeviceWorkArgs& args, const WorkspacePlan& plan) {
    int32_t* base = args.workspace;
    return {base,
            base + plan.list.offset_order,
            base + plan.list.offset_segment_offsets,
            reinterpret_cast<WorkSegment*>(base + plan.list.offset_segments),
            reinterpret_cast<WorkPiece*>(base + plan.list.offset_pieces),
            reinterpret_cast<Slice*>(base + plan.offset_slices),
            reinterpret_cast<int2*>(base + plan.offset_rows),
            base + plan.offset_num_segments,
            base + plan.offset_num_pieces,
            base + plan.offset_costs,
            base + plan.offset_piece_begin,
            base + plan.offset_pool_begin,
            base + plan.offset_block_status,
            reinterpret_cast<unsigned long long*>(base + plan.offset_pool_used),
            base + plan.offset_pool,
            plan.capacity_segments,
            plan.capacity_pieces,
            plan.capacity_pool,
            static_cast<int32_t>(args.num_slices),
            static_cast<int32_t>(plan.list.num_tiles),
            static_cast<int32_t>(plan.list.num_rows),
            args.tile_rows,
            args.block_cols,
            static_cast<int32_t>(smaller<int64_t>(args.num_slices, kSharedPieces)),
            static_cast<int32_t>(smaller<int64_t>(larger<int64_t>((args.num_slices + 255) / 256, 1), kMaxStatusBlocks))};
}

__global__ void read_slices(const __grid_constant__ DeviceWorkArgs args, const __grid_constant__ Workspace ws) {
    int32_t status = 0;
    for (int32_t idx = blockIdx.x * blockDim.x + threadIdx.x; idx < ws.num_slices; idx += gridDim.x * blockDim.x) {
        const Slice slice = read_slice(args, idx, status);
        ws.slices[idx] = slice;
        ws.rows[idx] = make_int2(slice.q_start, slice.q_end);
    }
    // A word per CTA needs no memory that is zero before. One vote per bit: a CTA votes on a yes or no.
    const int outside = __syncthreads_or(status & kRangeOutside), unknown = __syncthreads_or(status & kUnknownType);
    if (threadIdx.x != 0) return;
    ws.block_status[blockIdx.x] = (outside ? kRangeOutside : 0) | (unknown ? kUnknownType : 0);
    if (blockIdx.x == 0) *ws.pool_used = 0;
}

// Copies the tile's pieces, in any order, as far as they fit; returns how many there are. All threads of the CTA call it.
__device__ __forceinline__ int32_t gather(const Workspace& ws, int32_t first_row, int32_t end_row, Slice* pieces, int32_t capacity,
                                          int32_t* num_found) {
    if (threadIdx.x == 0) *num_found = 0;
    __syncthreads();
    constexpr int kAhead = 4;  // loads in flight
    for (int64_t base = threadIdx.x; base < ws.num_slices; base += int64_t{kAhead} * kTileThreads) {
        int2 rows[kAhead];
#pragma unroll
        for (int n = 0; n < kAhead; ++n) {
            const int64_t idx = base + n * kTileThreads;
            rows[n] = idx < ws.num_slices ? __ldg(ws.rows + idx) : make_int2(0, 0);
        }
#pragma unroll
        for (int n = 0; n < kAhead; ++n) {
            if (rows[n].x >= end_row || rows[n].y <= first_row) continue;
            const int32_t position = atomicAdd(num_found, 1);
            if (position >= capacity) continue;
            Slice piece = ws.slices[base + n * kTileThreads];
            piece.q_start = larger(piece.q_start, first_row);
            piece.q_end = smaller(piece.q_end, end_row);
            tighten(piece);  // every row of a tight slice sees a column
            pieces[position] = piece;
        }
    }
    __syncthreads();
    return *num_found;
}

// Room in the pool for a tile with many pieces, or -1. One allocation per tile, in any order: all fit or the list is dropped.
__device__ __forceinline__ int64_t take_from_pool(const Workspace& ws, int32_t tile, int32_t num_pieces, int64_t* taken) {
    if (threadIdx.x == 0) {
        const auto begin = static_cast<int64_t>(atomicAdd(ws.pool_used, static_cast<unsigned long long>(num_pieces)));
        *taken = begin + num_pieces <= ws.capacity_pool ? begin : -1;
        ws.pool_begin[tile] = static_cast<int32_t>(*taken);
    }
    __syncthreads();
    return *taken;
}

// kFill false: counts and cost of every tile. kFill true: the records, at places that are known now. One CTA per tile.
template <bool kFill>
__global__ void __launch_bounds__(kTileThreads) make_tiles(const __grid_constant__ Workspace ws) {
    extern __shared__ __align__(16) int32_t shared[];
    __shared__ int64_t partials[kTileThreads];
    __shared__ int64_t taken;
    __shared__ int32_t num_found;
    const auto tile = static_cast<int32_t>(blockIdx.x);
    if (kFill && (ws.segment_offsets[tile] == ws.segment_offsets[tile + 1])) return;  // nothing in it, or the list was dropped
    const int32_t first_row = tile * ws.tile_rows;
    const int32_t end_row = static_cast<int32_t>(smaller<int64_t>(int64_t{first_row} + ws.tile_rows, ws.num_rows));
    TileScratch scratch(shared, ws.shared_pieces);
    const int32_t num_pieces = gather(ws, first_row, end_row, scratch.pieces, ws.shared_pieces, &num_found);
    if (num_pieces > ws.shared_pieces) {
        const int64_t begin = kFill ? int64_t{ws.pool_begin[tile]} : take_from_pool(ws, tile, num_pieces, &taken);
        if (begin < 0) {
            if (threadIdx.x == 0) ws.num_segments[tile] = ws.num_pieces[tile] = INT32_MAX, ws.costs[tile] = 0;
            return;
        }
        scratch = TileScratch(ws.pool + begin * TileScratch::kIntsPerPiece, num_pieces);
        __syncthreads();  // num_found is read by all before it starts again
        gather(ws, first_row, end_row, scratch.pieces, num_pieces, &num_found);
    }
    CtaTeam team{partials};
    TileSegments<CtaTeam> segments(team, scratch, num_pieces, first_row, end_row - first_row, ws.block_cols);
    const TileTotals totals = segments.measure();
    if (kFill) {
        segments.write(ws.segments + ws.segment_offsets[tile], ws.pieces, ws.piece_begin[tile]);
    } else if (threadIdx.x == 0) {
        ws.num_segments[tile] = static_cast<int32_t>(totals.num_edges + totals.num_interior);
        ws.num_pieces[tile] = static_cast<int32_t>(smaller<int64_t>(totals.num_pieces, INT32_MAX));
        ws.costs[tile] = tile_cost(totals.num_interior_blocks, totals.num_edge_blocks);
    }
}

// First CTA: where the records of each tile begin, and the header.
__device__ void place_records(const Workspace& ws, int64_t* partials) {
    CtaTeam team{partials};
    const int64_t num_segments = team_sum(team, ws.num_tiles, [&](int32_t tile) { return int64_t{ws.num_segments[tile]}; });
    const int64_t num_pieces = team_sum(team, ws.num_tiles, [&](int32_t tile) { return int64_t{ws.num_pieces[tile]}; });
    const bool fits = num_segments <= ws.capacity_segments && num_pieces <= ws.capacity_pieces;
    team_scan(
        team, ws.num_tiles, Sum{}, [&](int32_t tile) { return int64_t{ws.num_segments[tile]}; },
        [&](int32_t tile, int64_t before) { ws.segment_offsets[tile] = fits ? static_cast<int32_t>(before) : 0; });
    team_scan(
        team, ws.num_tiles, Sum{}, [&](int32_t tile) { return int64_t{ws.num_pieces[tile]}; },
        [&](int32_t tile, int64_t before) { ws.piece_begin[tile] = fits ? static_cast<int32_t>(before) : 0; });
    int32_t status = fits ? 0 : kListTooLong;
    for (int32_t block = 0; block < ws.num_status_blocks; ++block) status |= ws.block_status[block];
    if (threadIdx.x != 0) return;
    ws.segment_offsets[ws.num_tiles] = fits ? static_cast<int32_t>(num_segments) : 0;
    ws.header[0] = status;
    ws.header[1] = fits ? static_cast<int32_t>(num_segments) : 0;
    ws.header[2] = fits ? static_cast<int32_t>(num_pieces) : 0;
    ws.header[3] = 0;
}

// The other CTAs: one warp per tile counts the tiles that come before it.
__global__ void __launch_bounds__(kPlaceThreads) place_tiles(const __grid_constant__ Workspace ws) {
    __shared__ int64_t partials[kPlaceThreads];
    if (blockIdx.x == 0) {
        place_records(ws, partials);
        return;
    }
    const int64_t tile = int64_t{blockIdx.x - 1} * kTilesPerPlaceBlock + threadIdx.x / 32;
    if (tile >= ws.num_tiles) return;
    const int32_t cost = ws.costs[tile];
    int32_t num_before = 0;
    for (int32_t other = static_cast<int32_t>(threadIdx.x % 32); other < ws.num_tiles; other += 32) {
        const int32_t their_cost = __ldg(ws.costs + other);
        num_before += their_cost > cost || (their_cost == cost && other < tile);
    }
    num_before = __reduce_add_sync(~0u, num_before);
    if (threadIdx.x % 32 == 0) ws.order[num_before] = static_cast<int32_t>(tile);
}

std::string reason_against(const DeviceWorkArgs& args) {
    const auto told = [](const char* name, int64_t value, const char* rule) {
        return std::string(name) + "=" + std::to_string(value) + " " + rule;
    };
    if (args.total_q < 0 || args.total_q > kMaxTokens) return told("total_q", args.total_q, "must be from 0 to 2^30 - 1");
    if (args.total_k < 0 || args.total_k > kMaxTokens) return told("total_k", args.total_k, "must be from 0 to 2^30 - 1");
    if (args.tile_rows < 1 || args.tile_rows > kMaxDeviceTileRows) return told("tile_rows", args.tile_rows, "must be from 1 to 1024");
    if (args.block_cols < 1 || args.block_cols > kMaxTokens) return told("block_cols", args.block_cols, "must be from 1 to 2^30 - 1");
    if (args.num_slices < 0 || args.num_slices > kMaxDeviceSlices)
        return told("num_slices", args.num_slices, "must be from 0 to 2^24; the host planner takes more");
    return {};
}

std::string reason_against_pointers(const DeviceWorkArgs& args) {
    if (args.workspace == nullptr || reinterpret_cast<uintptr_t>(args.workspace) % 16 != 0) return "workspace must be aligned to 16 bytes";
    if (args.slices != nullptr || args.num_slices == 0) return {};
    if (args.q_ranges == nullptr || args.k_ranges == nullptr) return "q_ranges and k_ranges, or slices, must be given";
    if (args.range_bytes != 4 && args.range_bytes != 8) return "range_bytes must be 4 or 8";
    if (args.types != nullptr && args.type_bytes != 4 && args.type_bytes != 8) return "type_bytes must be 4 or 8";
    return {};
}

int launch_all(const DeviceWorkArgs& args, const Workspace& ws, cudaStream_t stream) {
    const auto num_tiles = static_cast<unsigned>(ws.num_tiles);
    const size_t shared_bytes = static_cast<size_t>(ws.shared_pieces) * TileScratch::kIntsPerPiece * sizeof(int32_t);
    read_slices<<<static_cast<unsigned>(ws.num_status_blocks), 256, 0, stream>>>(args, ws);
    if (num_tiles != 0) make_tiles<false><<<num_tiles, kTileThreads, shared_bytes, stream>>>(ws);
    place_tiles<<<1 + (num_tiles + kTilesPerPlaceBlock - 1) / kTilesPerPlaceBlock, kPlaceThreads, 0, stream>>>(ws);
    if (num_tiles != 0) make_tiles<true><<<num_tiles, kTileThreads, shared_bytes, stream>>>(ws);
    const cudaError_t launched = cudaGetLastError();
    return launched == cudaSuccess ? 0 : fail("device work list", launched);
}

}  // namespace
}  // namespace magi

MAGI_EXPORT int magi_ffa_device_work_layout(const magi::DeviceWorkArgs* args, magi::DeviceWorkLayout* layout) {
    const std::string reason = magi::reason_against(*args);
    if (!reason.empty()) return magi::fail(reason);
    *layout = magi::plan_workspace(*args).list;
    return 0;
}

MAGI_EXPORT int magi_ffa_device_work(const magi::DeviceWorkArgs* args, void* stream) {
    std::string reason = magi::reason_against(*args);
    if (reason.empty()) reason = magi::reason_against_pointers(*args);
    if (!reason.empty()) return magi::fail(reason);
    return magi::launch_all(*args, magi::workspace_of(*args, magi::plan_workspace(*args)), static_cast<cudaStream_t>(stream));
}
