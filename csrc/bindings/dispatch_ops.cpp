// Dispatch operations: arrays in, arrays out.
#include "bindings/flatten.h"
#include "bindings/ops.h"
#include "solver/chunk_area.h"
#include "solver/dispatch.h"

namespace magi {

namespace {

int64_t number_in(const Arrays& inputs, const std::string& name, int64_t low, int64_t high) {
    const int64_t value = inputs.scalar(name);
    if (value < low || value > high)
        throw InputError(name + "=" + std::to_string(value) + " must be in [" + std::to_string(low) + ", " + std::to_string(high) + "]");
    return value;
}

constexpr int64_t kMaxRanks = 1 << 20;

}  // namespace

// slices int32 [N, 6], total_tokens, chunk_size (0: choose), cp_size, is_even, owns_keys, algorithm, top_p_ppm ->
// owner int32 [num_chunks], chunk_size, way, max_area, total_area, max_tokens, remote_rows.
void op_solve_dispatch(const Arrays& inputs, Arrays& outputs) {
    DispatchRequest request;
    request.slices = inputs.view<Slice>("slices");
    request.total_tokens = number_in(inputs, "total_tokens", 0, kMaxTokens);
    request.chunk_size = number_in(inputs, "chunk_size", 0, kMaxTokens);
    request.cp_size = static_cast<int32_t>(number_in(inputs, "cp_size", 1, kMaxRanks));
    request.is_even = number_in(inputs, "is_even", 0, 1) != 0;
    request.owns_keys = number_in(inputs, "owns_keys", 0, 1) != 0;
    request.algorithm = static_cast<DispatchAlgorithm>(number_in(inputs, "algorithm", 0, kNumDispatchAlgorithms - 1));
    request.top_p_ppm = number_in(inputs, "top_p_ppm", 1, 1000000);
    DispatchOutcome outcome = solve_dispatch(request);
    outputs.set("owner", std::move(outcome.owner));
    outputs.set("chunk_size", outcome.chunk_size);
    outputs.set("way", int64_t{static_cast<int32_t>(outcome.way)});
    outputs.set("max_area", outcome.max_area);
    outputs.set("total_area", outcome.total_area);
    outputs.set("max_tokens", outcome.max_tokens);
    outputs.set("remote_rows", outcome.remote_rows);
}

// slices, q_total, q_chunk_size, q_owner int32, k_total, k_chunk_size, cp_size, is_even -> owner int32 [num key chunks].
void op_dispatch_keys(const Arrays& inputs, Arrays& outputs) {
    KeyDispatchRequest request;
    request.slices = inputs.view<Slice>("slices");
    request.q_grid = {number_in(inputs, "q_total", 0, kMaxTokens), number_in(inputs, "q_chunk_size", 1, kMaxTokens)};
    request.q_owner = inputs.view<int32_t>("q_owner");
    request.k_grid = {number_in(inputs, "k_total", 0, kMaxTokens), number_in(inputs, "k_chunk_size", 1, kMaxTokens)};
    request.cp_size = static_cast<int32_t>(number_in(inputs, "cp_size", 1, kMaxRanks));
    request.is_even = number_in(inputs, "is_even", 0, 1) != 0;
    outputs.set("owner", solve_key_dispatch(request));
}

// slices, total_tokens, chunk_size -> areas int64 [num_chunks], first int64 [num_chunks + 1], needs int32 [M, 2].
void op_chunk_costs(const Arrays& inputs, Arrays& outputs) {
    const ChunkGrid grid{number_in(inputs, "total_tokens", 0, kMaxTokens), number_in(inputs, "chunk_size", 1, kMaxTokens)};
    outputs.set("areas", chunk_areas(inputs.view<Slice>("slices"), grid));
    ChunkNeeds needs = chunk_needs(inputs.view<Slice>("slices"), grid);
    outputs.set("first", std::move(needs.first));
    outputs.set("needs", flatten(needs.intervals));
}

}  // namespace magi
