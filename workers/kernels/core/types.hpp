// What every part of the library shares: codecs, instruction-set levels and the two ways to end early.
//
// The core knows nothing of Python: it is compiled by itself for the sanitizers, for other machines, and into
// the extension module.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace phasemesh::kernels {

// How a token vector of `dim` elements is stored, one row per token, rows one after the other.
//
//   int8  dim bytes: u = 128 + v with v = -127..127, value = v * step(codec, dim), rotated
//   int4  dim / 2 bytes: byte i holds element i in its low and element i + dim / 2 in its high nibble;
//         u = 0..15, v = 2 u - 15, value = v * step(codec, dim), rotated
//   bf16  dim bfloat16, as is
//   f16   dim IEEE binary16, as is
//   f32   dim IEEE binary32, as is
enum class Codec : std::uint8_t { int8, int4, bf16, f16, f32 };

// Instruction sets, by the level that a machine offers or that a caller asks for. Of the x86 ones a later one
// includes the earlier: a level is an upper limit, and work that has no code of its own at it takes the next
// lower. `amx_model` is the AMX code on a model of the tile instructions in plain C++, for tests on machines
// without AMX; it needs AVX-512 for the rest and is never chosen by itself.
enum class Isa : std::uint8_t { portable, neon, avx2, avxvnni, avx512, amx, amx_model };

// Element types of token vectors that are to be encoded, and of queries.
enum class FloatType : std::uint8_t { f16, f32, f64 };

// An argument that cannot be used. The text starts with the argument's name, then says what is wrong.
class ArgumentError : public std::invalid_argument {
   public:
    using std::invalid_argument::invalid_argument;
};

// The work was called off.
class Cancelled : public std::runtime_error {
   public:
    Cancelled() : std::runtime_error("cancelled") {}
};

// Dimensions are multiples of this, ...
inline constexpr std::size_t kDimStep = 16;
// ... and at most this, so that a dot product of 8-bit codes stays far inside int32.
inline constexpr std::size_t kMaxDim = 4096;
inline constexpr std::size_t kMaxQueryTokens = 4096;

// Bytes of one encoded token.
constexpr std::size_t code_bytes(Codec codec, std::size_t dim) {
    switch (codec) {
        case Codec::int8: return dim;
        case Codec::int4: return dim / 2;
        case Codec::bf16:
        case Codec::f16: return 2 * dim;
        case Codec::f32: return 4 * dim;
    }
    return 0;
}

constexpr bool is_integer(Codec codec) { return codec == Codec::int8 || codec == Codec::int4; }

}  // namespace phasemesh::kernels
