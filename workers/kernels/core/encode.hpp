// The seam between encoding and the code of one instruction set: a run of tokens, 16 at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.hpp"

namespace phasemesh::kernels {

struct RotationView {
    const std::uint32_t* from;  // [dim] or null
    const float* sign;          // [dim]
};

struct EncodeRun {
    const std::uint8_t* tokens;  // the first token's elements
    FloatType type;
    std::size_t count, dim;
    Codec codec;
    float step;  // of integer codecs
    const RotationView* rounds;
    std::size_t round_count, block;
    float rotation_scale;
    std::uint8_t* codes;  // the first token's; null: only norms are wanted
    float* scales;        // null for none
    float* errors;        // null for none
    double* norms;        // [count], squared; not finite for tokens that aren't; null for none
    float* scratch;       // [2 * dim * 16], aligned to 64 bytes
};

using Encoder = void (*)(const EncodeRun&);

void encode_portable(const EncodeRun& run);
void encode_avx2(const EncodeRun& run);
void encode_avx512(const EncodeRun& run);

}  // namespace phasemesh::kernels
