// The other yardstick of scans: how fast the integer multiplier is when it does nothing else.
#pragma once

#include <cstdint>

#include "types.hpp"

namespace phasemesh::kernels {

// Products of two 8-bit elements per second, of `threads` threads together, at the level's own dot-product
// instruction with all operands in registers; the best of `repeats`. 0 where the level has none.
double multiply_rate(int threads, int repeats, Isa isa);

// One thread's `rounds` of 16 (AMX: 4) independent dot products; returns the products done.
using Multiplier = std::uint64_t (*)(std::uint64_t rounds);
std::uint64_t multiply_avx512(std::uint64_t rounds);
std::uint64_t multiply_amx(std::uint64_t rounds);

}  // namespace phasemesh::kernels
