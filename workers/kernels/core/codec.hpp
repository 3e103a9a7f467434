// Codecs: the rotation, the quantiser, and encoding and decoding of whole batches of ragged documents.
//
// Everything here is reproducible bit for bit on any machine and at any instruction set: sums and products in
// binary32 and binary64 with a fixed order and without contraction, round half to even, and integer arithmetic
// for the choice of signs and permutations.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "types.hpp"

namespace phasemesh::kernels {

// A random orthogonal matrix, fixed by (dim, seed): rounds of sign flips, a permutation, and a Hadamard
// transform of blocks of the largest power of two that divides dim.
class Rotation {
   public:
    // dim: a multiple of 16 up to 4096; otherwise ArgumentError "dim: ...".
    Rotation(std::size_t dim, std::uint64_t seed);
    ~Rotation();
    Rotation(Rotation&&) noexcept;

    std::size_t dim() const;
    // rows [count, dim] -> out [count, dim], binary32; `out` may be `rows`.
    void forward(const float* rows, std::size_t count, float* out) const;
    // The inverse, to rounding.
    void backward(const float* rows, std::size_t count, float* out) const;

    struct State;
    const State& state() const { return *state_; }

   private:
    std::unique_ptr<State> state_;
};

// The largest magnitude that int8 and int4 codes of unit vectors represent is clip(codec, dim) = c / sqrt(dim).
float clip(Codec codec, std::size_t dim);
// Value of one integer step: value = step * v. clip / 127 for int8, clip / 15 for int4.
float step(Codec codec, std::size_t dim);

enum class Flaw : std::uint8_t { not_finite, zero_norm };

struct Refused {
    std::int64_t document;
    std::int64_t token;  // position in the whole batch
    Flaw flaw;
};

// Squared norms within this of 1 count as unit length: float16 rounding of a unit vector stays inside.
inline constexpr double kUnitTolerance = 4e-3;

struct EncodeResult {
    // Documents with a token that has no code; their codes (and scales) are zeros. Ascending by document, the
    // first bad token of each.
    std::vector<Refused> refused;
    // Whether all other tokens are of unit length (always true where the codec keeps no scales).
    bool unit = true;
};

// Encodes tokens [count, dim] to codes [count, code_bytes(codec, dim)].
//
// scales: float32 [count], or null. With scales, integer codes are of x / |x| and the scale is |x|; without,
//   they are of x itself (right for unit vectors only; elements beyond the clip are clipped). Float codecs
//   never use scales.
// offsets: int64 [documents + 1] within 0..count, ascending, or null: each token is a document. Tokens outside
//   every document are encoded too where they can be.
// threads: at least 1. isa: upper limit.
// errors: where not null, receives for float and integer codecs alike the distance |x - decode(encode(x))| / scale,
//   rounded up, float32 [count]; 0 for refused tokens. Null: not computed.
EncodeResult encode(const void* tokens, FloatType type, std::size_t count, std::size_t dim, Codec codec,
                    std::uint64_t seed, const std::int64_t* offsets, std::size_t documents, int threads, Isa isa,
                    std::uint8_t* codes, float* scales, float* errors);

// Whether every finite, non-zero token has unit length (kUnitTolerance).
bool all_unit(const void* tokens, FloatType type, std::size_t count, std::size_t dim, int threads, Isa isa);

// codes -> float32 [count, dim] in the vectors' own basis (rotation undone), times scales where given.
void decode(const std::uint8_t* codes, std::size_t count, std::size_t dim, Codec codec, std::uint64_t seed,
            const float* scales, int threads, float* out);

}  // namespace phasemesh::kernels
