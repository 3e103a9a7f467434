// The seam between the scan and the code of one instruction set: maxima of dot products, and nothing else.
//
// Queries are packed once into *panels*: groups of 16 columns (query tokens), and within a group, for every
// 4-byte step of a row, the 16 columns' own 4 bytes one after the other (64 bytes: a cache line, a vector
// register, a tile row). A row in scan form is multiplied 4 bytes at a time with all 16 columns. The same panel
// serves every instruction set that packs elements alike.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.hpp"

namespace phasemesh::kernels {

inline constexpr std::size_t kGroup = 16;

// What the 4 bytes of a step hold.
enum class Pack : std::uint8_t {
    s8x4,    // columns int8, rows uint8
    s16x2,   // columns int16, rows int16
    bf16x2,  // both bfloat16
    f32x1,   // both binary32
};

constexpr std::size_t pack_bytes(Pack pack) {
    return pack == Pack::s8x4 ? 1 : pack == Pack::f32x1 ? 4 : 2;
}

struct Panel {
    const std::uint8_t* data = nullptr;  // [groups, steps, 16, 4 bytes], aligned to 64 bytes
    std::size_t groups = 0;
    std::size_t steps = 0;  // 4-byte steps of a row
    // For scaled documents only: v = (dot << shift) - corrections[column], see Engine::zero.
    const std::int32_t* corrections = nullptr;  // [groups * 16]
    int shift = 0;
};

// Consecutive tokens of one document.
struct Piece {
    const std::uint8_t* rows = nullptr;  // [tokens, 4 * steps] in scan form
    std::int64_t tokens = 0;             // at least 1
    std::int64_t before = 0, after = 0;  // rows that may be read (and ignored) before and after these
    const float* scales = nullptr;       // [tokens], for scaled documents
    std::int32_t first = 0;              // position of the first token in its document, for `best_at`
};

// best[c] = max(best[c], max over tokens of row . column c) for all groups * 16 columns; where that raises best,
// best_at[c] = position of the first token that reaches it. best_at may be null.
using ScanInteger = void (*)(const Panel&, const Piece&, std::int32_t* best, std::int32_t* best_at);
using ScanFloat = void (*)(const Panel&, const Piece&, float* best, std::int32_t* best_at);

// The same, and every v = row . column is written to `all`, [tokens, groups * 16]: for those who have to know which
// tokens come near the maximum. `best` is raised as above. Only int8 and f16 codes have it, and no tile unit.
using KeepInteger = void (*)(const Panel&, const Piece&, std::int32_t* best, std::int32_t* all);
using KeepFloat = void (*)(const Panel&, const Piece&, float* best, float* all);

// The code of one codec at one level.
struct Engine {
    Pack pack;
    // Brings codes [tokens, code_bytes] into scan form, [tokens, dim * pack_bytes], and returns the largest
    // magnitude among float elements, infinity or NaN where one isn't finite (0 for integer codecs, whose codes
    // are all good). Null: the codes are in scan form.
    float (*stage)(const std::uint8_t* codes, std::int64_t tokens, std::size_t dim, std::uint8_t* rows) = nullptr;
    // For float codecs that aren't staged: that magnitude.
    float (*largest)(const std::uint8_t* codes, std::int64_t tokens, std::size_t dim) = nullptr;
    ScanInteger integer = nullptr;
    ScanFloat scaled = nullptr;    // integer codecs with scales: maxima of v * scale
    ScanFloat floating = nullptr;  // float codecs
    // What a row's integers are still to be lowered by: v = (dot << shift) - zero * sum of the column.
    std::int32_t zero = 0;
    int shift = 0;
    // Around a thread's use of the engine (tile configuration). May be null.
    void (*enter)(std::size_t row_bytes) = nullptr;
    void (*leave)() = nullptr;
    KeepInteger keep_integer = nullptr;
    KeepFloat keep_scaled = nullptr;
    KeepFloat keep_floating = nullptr;
};

// level: from `resolve`.
const Engine& engine(Codec codec, Isa level);

// One per instruction set; null where it has nothing of its own for the codec. Defined by the file of that name.
const Engine* engine_portable(Codec codec);
const Engine* engine_neon(Codec codec);
const Engine* engine_dotprod(Codec codec);
const Engine* engine_avx2(Codec codec);
const Engine* engine_avxvnni(Codec codec);
const Engine* engine_avx512(Codec codec);
const Engine* engine_avx512bf16(Codec codec);
const Engine* engine_amx(Codec codec);
const Engine* engine_amx_model(Codec codec);

}  // namespace phasemesh::kernels
