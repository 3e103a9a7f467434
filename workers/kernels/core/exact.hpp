// Exact MaxSim of float16 vectors: the same bits on every machine, at nearly the speed of a scan.
//
// *Exact* is arithmetic in binary64 in one order. The product of a float16 and a float32 needs 35 bits and is
// exact in binary64; a dot product adds its products in eight lanes, lane l those of elements l, l + 8, ..., each
// in ascending order and from 0, and then the lanes, `sum_lanes`. The maxima of a query's tokens are added the same
// way. So a score is a function of the query and of the set of a document's vectors alone: not of the instruction
// set, not of how documents lie, not of what else is scored.
//
// Few vectors can be a maximum. A scan in other arithmetic, of the vectors themselves in binary32 or of their 8-bit
// codes, finds those whose similarity comes within twice its error of the largest; only they are multiplied in
// binary64. Whoever calls proves the error.
#pragma once

#include <cstddef>
#include <cstdint>

#include "scan.hpp"
#include "types.hpp"

namespace phasemesh::kernels {

inline constexpr std::size_t kLanes = 8;

// How far a scanned similarity of query token j with a vector of result i can be from exact:
//   spread[j] * reach[i] + spread[q + j] * reach[m + i]
// An infinite bound makes every vector of the result count as near the maximum.
struct Bounds {
    const double* spread = nullptr;  // [2, q]
    const double* reach = nullptr;   // [2, m]
};

// query: float32 [q, dim]. vectors: float16, all finite. queries and scanned: what is scanned, of the same tokens,
// int8 or f16, in the unit that `bounds` is in; prepared for a level up to avx512, because tile units keep no
// similarities (`exact_level`). selection: indices or a range. scores: [results], -inf for empty documents.
// Works on the calling thread alone. Throws ArgumentError, Cancelled, or what the checkpoint threw.
void exact_maxsim(const Query& query, const Documents& vectors, const PreparedQueries& queries,
                  const Documents& scanned, const Bounds& bounds, const Selection& selection,
                  const Options& options, double* scores);

// The level to prepare for where at most `limit` is wanted.
Isa exact_level(Isa limit);

// --- the code of one instruction set ---

struct ExactCode {
    // float16 [dim] to binary64.
    void (*widen)(const std::uint8_t* half, std::size_t dim, double* wide);
    // best[c] = max(best[c], wide . query[c]) for `count` columns c, in the order above. query: [q, dim].
    void (*raise)(const double* wide, const double* query, std::size_t dim, const std::int32_t* columns,
                  std::size_t count, double* best);
    // Bit l: value[l] >= floor[l], of kGroup values.
    std::uint32_t (*reach_integer)(const std::int32_t* value, const std::int32_t* floor);
    std::uint32_t (*reach_float)(const float* value, const float* floor);
};

const ExactCode& exact_portable();
const ExactCode& exact_avx2();
const ExactCode& exact_avx512();

}  // namespace phasemesh::kernels
