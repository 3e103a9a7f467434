// The kernel itself, once, over the vector types of an instruction set.
//
// Register blocking: T tokens by Q groups of 16 columns. Each step loads the columns' 4 bytes (contiguous) and
// each token's 4 bytes (broadcast), and multiplies all with all; the T * 16 Q sums never leave registers, and of
// them only the running maxima are kept. The similarity matrix is never written. Tokens that don't fill a block
// are computed twice rather than padded: a maximum doesn't mind, and nothing beyond the piece is read.
//
// Included by one file per instruction set, each compiled with its own flags; everything is in an unnamed
// namespace, so that no linker can take one file's copy for another's.
//
// `Op` supplies:
//   Acc, Flt            vectors of int32 (or the float accumulator type) and of float, `kLanes` wide
//   zero() load(p) broadcast(p) mac(acc, column, row)
//   min_value<Element>() of the accumulators; get/put of Acc and Flt at int32 and float addresses
//   raise(best, acc) -> best; raise_at(best, at, acc, position)
//   scaled(acc, shift, correction, scale) -> Flt        where integers
#pragma once

#include <algorithm>
#include <cstring>

#include "micro.hpp"

namespace phasemesh::kernels {
namespace {

// Accumulators that are compared as they are.
template <class Op>
struct Plain {
    using Element = typename Op::Element;
    using Best = typename Op::Acc;
    static Best get(const Element* p) { return Op::get(p); }
    static void put(Element* p, Best b) { Op::put(p, b); }
    static Best value(const Panel&, std::size_t, typename Op::Acc acc, const Piece&, std::int64_t) { return acc; }
    static Best raise(Best best, Best v) { return Op::raise(best, v); }
    static void raise_at(Best& best, typename Op::At& at, Best v, std::int32_t position) {
        Op::raise_at(best, at, v, position);
    }
};

// Integer accumulators that are scaled per token first.
template <class Op>
struct Scaled {
    using Element = float;
    using Best = typename Op::Flt;
    static Best get(const float* p) { return Op::get(p); }
    static void put(float* p, Best b) { Op::put(p, b); }
    static Best value(const Panel& panel, std::size_t column, typename Op::Acc acc, const Piece& piece,
                      std::int64_t token) {
        return Op::scaled(acc, panel.shift, panel.corrections + column, piece.scales[token]);
    }
    static Best raise(Best best, Best v) { return Op::raise(best, v); }
    static void raise_at(Best& best, typename Op::At& at, Best v, std::int32_t position) {
        Op::raise_at(best, at, v, position);
    }
};

// What is kept of the similarities: the maxima, where they are too, or the maxima and all the rest.
enum class Keep { best, place, all };

template <class Op, class Way, int T, int Q, Keep K>
inline __attribute__((always_inline)) void block(const Panel& panel, std::size_t group, const Piece& piece,
                                                 std::int64_t token, typename Way::Element* best,
                                                 std::int32_t* best_at, typename Way::Element* all) {
    constexpr int V = static_cast<int>(kGroup) / Op::kLanes * Q;  // vectors of columns
    const std::size_t row_bytes = 4 * panel.steps;
    const std::uint8_t* row[T];
    std::int64_t at[T];
    for (int t = 0; t < T; ++t) {
        at[t] = std::min(token + t, piece.tokens - 1);
        row[t] = piece.rows + static_cast<std::size_t>(at[t]) * row_bytes;
    }
    const std::uint8_t* columns[Q];
    for (int q = 0; q < Q; ++q) columns[q] = panel.data + (group + q) * panel.steps * 64;

    typename Op::Acc acc[T][V];
    for (int t = 0; t < T; ++t) {
        for (int v = 0; v < V; ++v) acc[t][v] = Op::zero();
    }
    constexpr int kPerGroup = static_cast<int>(kGroup) / Op::kLanes;
    // Unrolled by order: a compiler that unrolls these loops late moves every sum through a copy at each step.
    for (std::size_t s = 0; s < panel.steps; ++s) {
        typename Op::Column column[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
            column[v] = Op::load(columns[v / kPerGroup] + 64 * s + 4 * Op::kLanes * (v % kPerGroup));
        }
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
            const typename Op::Row r = Op::broadcast(row[t] + 4 * s);
#pragma GCC unroll 16
            for (int v = 0; v < V; ++v) acc[t][v] = Op::mac(acc[t][v], column[v], r);
        }
    }
    for (int v = 0; v < V; ++v) {
        const std::size_t column = group * kGroup + static_cast<std::size_t>(v) * Op::kLanes;
        auto b = Way::get(best + column);
        if constexpr (K == Keep::place) {
            auto where = Op::get_at(best_at + column);
            for (int t = 0; t < T; ++t) {
                Way::raise_at(b, where, Way::value(panel, column, acc[t][v], piece, at[t]),
                              piece.first + static_cast<std::int32_t>(at[t]));
            }
            Op::put_at(best_at + column, where);
        } else {
            for (int t = 0; t < T; ++t) {
                const auto value = Way::value(panel, column, acc[t][v], piece, at[t]);
                b = Way::raise(b, value);
                if constexpr (K == Keep::all) {
                    Way::put(all + static_cast<std::size_t>(at[t]) * panel.groups * kGroup + column, value);
                }
            }
        }
        Way::put(best + column, b);
    }
}

template <class Op, class Way, int Q, Keep K>
inline void columns_of(const Panel& panel, std::size_t group, const Piece& piece, typename Way::Element* best,
                       std::int32_t* best_at, typename Way::Element* all) {
    constexpr int T = Op::kTokens;
    const std::size_t row_bytes = 4 * panel.steps;
    std::int64_t token = 0;
    for (; token + T <= piece.tokens; token += T) {
        if constexpr (Op::kPrefetch > 0) {
            // Ahead of the hardware's own prefetcher, which loses the trail at every page.
            const std::uint8_t* ahead = piece.rows + static_cast<std::size_t>(token) * row_bytes + Op::kPrefetch;
            for (std::size_t byte = 0; byte < T * row_bytes; byte += 64) __builtin_prefetch(ahead + byte, 0, 3);
        }
        block<Op, Way, T, Q, K>(panel, group, piece, token, best, best_at, all);
    }
    switch (piece.tokens - token) {
        case 0: break;
        case 1: block<Op, Way, 1, Q, K>(panel, group, piece, token, best, best_at, all); break;
        case 2: block<Op, Way, 2, Q, K>(panel, group, piece, token, best, best_at, all); break;
        case 3:
        case 4: block<Op, Way, 4, Q, K>(panel, group, piece, token, best, best_at, all); break;
        default: block<Op, Way, T, Q, K>(panel, group, piece, token, best, best_at, all); break;
    }
}

template <class Op, class Way>
void scan_piece(const Panel& panel, const Piece& piece, typename Way::Element* best, std::int32_t* best_at) {
    constexpr int Q = Op::kGroups;
    std::size_t group = 0;
    for (; group + Q <= panel.groups; group += Q) {
        if (best_at) {
            columns_of<Op, Way, Q, Keep::place>(panel, group, piece, best, best_at, nullptr);
        } else {
            columns_of<Op, Way, Q, Keep::best>(panel, group, piece, best, nullptr, nullptr);
        }
    }
    for (; group < panel.groups; ++group) {
        if (best_at) {
            columns_of<Op, Way, 1, Keep::place>(panel, group, piece, best, best_at, nullptr);
        } else {
            columns_of<Op, Way, 1, Keep::best>(panel, group, piece, best, nullptr, nullptr);
        }
    }
}

template <class Op, class Way>
void keep_piece(const Panel& panel, const Piece& piece, typename Way::Element* best, typename Way::Element* all) {
    constexpr int Q = Op::kGroups;
    std::size_t group = 0;
    for (; group + Q <= panel.groups; group += Q) {
        columns_of<Op, Way, Q, Keep::all>(panel, group, piece, best, nullptr, all);
    }
    for (; group < panel.groups; ++group) {
        columns_of<Op, Way, 1, Keep::all>(panel, group, piece, best, nullptr, all);
    }
}

inline float as_float(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Nibbles to bytes: element i is the low nibble of byte i, element i + dim / 2 the high one.
inline float stage_int4(const std::uint8_t* codes, std::int64_t tokens, std::size_t dim, std::uint8_t* rows) {
    const std::size_t half = dim / 2;
    for (std::int64_t t = 0; t < tokens; ++t, codes += half, rows += dim) {
        for (std::size_t i = 0; i < half; ++i) {
            rows[i] = codes[i] & 0xf;
            rows[half + i] = codes[i] >> 4;
        }
    }
    return 0.0f;
}

inline float stage_int8_wide(const std::uint8_t* codes, std::int64_t tokens, std::size_t dim, std::uint8_t* rows) {
    const std::size_t count = static_cast<std::size_t>(tokens) * dim;
    for (std::size_t i = 0; i < count; ++i) {
        const std::int16_t wide = codes[i];
        std::memcpy(rows + 2 * i, &wide, 2);
    }
    return 0.0f;
}

inline float stage_int4_wide(const std::uint8_t* codes, std::int64_t tokens, std::size_t dim, std::uint8_t* rows) {
    const std::size_t half = dim / 2;
    for (std::int64_t t = 0; t < tokens; ++t, codes += half, rows += 2 * dim) {
        for (std::size_t i = 0; i < half; ++i) {
            const std::int16_t low = codes[i] & 0xf, high = codes[i] >> 4;
            std::memcpy(rows + 2 * i, &low, 2);
            std::memcpy(rows + 2 * (half + i), &high, 2);
        }
    }
    return 0.0f;
}

inline float stage_bf16(const std::uint8_t* codes, std::int64_t tokens, std::size_t dim, std::uint8_t* rows) {
    const std::size_t count = static_cast<std::size_t>(tokens) * dim;
    std::uint32_t worst = 0;
    for (std::size_t i = 0; i < count; ++i) {
        std::uint16_t half;
        std::memcpy(&half, codes + 2 * i, 2);
        const std::uint32_t wide = static_cast<std::uint32_t>(half) << 16;
        worst = std::max(worst, wide & 0x7fffffffu);
        std::memcpy(rows + 4 * i, &wide, 4);
    }
    return as_float(worst);
}

inline float stage_f32(const std::uint8_t* codes, std::int64_t tokens, std::size_t dim, std::uint8_t* rows) {
    const std::size_t count = static_cast<std::size_t>(tokens) * dim;
    std::uint32_t worst = 0;
    for (std::size_t i = 0; i < count; ++i) {
        std::uint32_t word;
        std::memcpy(&word, codes + 4 * i, 4);
        worst = std::max(worst, word & 0x7fffffffu);
        std::memcpy(rows + 4 * i, &word, 4);
    }
    return as_float(worst);
}

// binary16 to binary32 with integer arithmetic alone; exact, subnormals included.
inline float stage_f16(const std::uint8_t* codes, std::int64_t tokens, std::size_t dim, std::uint8_t* rows) {
    const std::size_t count = static_cast<std::size_t>(tokens) * dim;
    std::uint32_t worst = 0;
    for (std::size_t i = 0; i < count; ++i) {
        std::uint16_t half;
        std::memcpy(&half, codes + 2 * i, 2);
        const std::uint32_t magnitude = half & 0x7fffu;
        worst = std::max(worst, magnitude);
        // The exponent is rebased by a multiplication, which normalises subnormals on the way.
        const std::uint32_t shifted = magnitude << 13;
        float value;
        std::memcpy(&value, &shifted, 4);
        value *= 0x1p112f;
        std::uint32_t bits;
        std::memcpy(&bits, &value, 4);
        bits |= static_cast<std::uint32_t>(half & 0x8000u) << 16;
        std::memcpy(rows + 4 * i, &bits, 4);
    }
    // Of binary16: infinities and NaN keep all exponent bits; below, the value itself.
    return worst < 0x7c00u ? as_float(worst << 13) * 0x1p112f : as_float(0x7f800000u);
}

inline float largest_bf16(const std::uint8_t* codes, std::int64_t tokens, std::size_t dim) {
    const std::size_t count = static_cast<std::size_t>(tokens) * dim;
    std::uint16_t worst = 0;
    for (std::size_t i = 0; i < count; ++i) {
        std::uint16_t half;
        std::memcpy(&half, codes + 2 * i, 2);
        worst = std::max<std::uint16_t>(worst, half & 0x7fffu);
    }
    return as_float(static_cast<std::uint32_t>(worst) << 16);
}

}  // namespace
}  // namespace phasemesh::kernels
