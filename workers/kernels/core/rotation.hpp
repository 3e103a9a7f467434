// The rotation's parameters, and how they come from a seed. Any implementation of what stands here gives the same
// bits.
//
//   B        the largest power of two that divides dim;  m = dim / B
//   rounds   2 where m = 1, else 4
//   scale    B^(-rounds / 2), a power of two
//
// Numbers come from splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), begun
// with the seed: state += 0x9e3779b97f4a7c15; z = state; z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
// z = (z ^ z >> 27) * 0x94d049bb133111eb; number = z ^ z >> 31, modulo 2^64.
//
// Each round draws, in this order,
//   where m > 1, a permutation p of 0..dim-1: from the identity, for i = dim-1 down to 1 exchange p[i] with p[j],
//     j = number mod (i + 1), where numbers below 2^64 mod (i + 1) are drawn again (none is favoured);
//   signs: for every 64 elements one number, whose bit i mod 64 set means that element i changes its sign,
// and maps x to y: y[i] = (-1)^sign[i] * x[p[i]], then a Hadamard transform of every B consecutive elements:
// for h = 1, 2, .. B/2, for pairs (i, i + h) with bit h of i clear: (a, b) -> (a + b, a - b), in binary32.
// The last round's result times `scale` is the rotated vector.
#pragma once

#include <cstdint>
#include <vector>

#include "codec.hpp"

namespace phasemesh::kernels {

struct Rotation::State {
    struct Round {
        std::vector<std::uint32_t> from;  // [dim]: the permutation; empty for none
        std::vector<float> sign;          // [dim]: 1 or -1
    };
    std::size_t dim = 0, block = 0;
    std::vector<Round> rounds;
    float scale = 1.0f;
};

// A vector's rotation in binary32 is off by at most this part of its norm: every addition is off by one unit
// roundoff of its result, so a stage by that part of the norm, and there are fewer than 64 stages.
inline constexpr double kRotationError = 64 * 0x1p-24;

}  // namespace phasemesh::kernels
