// Encoding, once, for every instruction set: 16 tokens at a time stand side by side, [dim][16], so that each
// butterfly, sign and permutation is the same vertical operation on 16 lanes whatever its distance. Included by
// one file per instruction set, each compiled with its own flags, into an unnamed namespace of its own. No sum is
// contracted and none depends on the width of vectors, so all give the same bits.
#pragma once

#include <cmath>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "encode.hpp"

namespace phasemesh::kernels {
namespace {

constexpr std::size_t kLanes = 16;

// One register. Wider vectors than the instruction set has would be taken apart by way of memory.
#if defined(__AVX512F__)
constexpr std::size_t kWidth = 16;
#elif defined(__AVX__)
constexpr std::size_t kWidth = 8;
#else
constexpr std::size_t kWidth = 4;
#endif
typedef float Vector __attribute__((vector_size(4 * kWidth), aligned(4 * kWidth)));
inline Vector load(const float* p) { return *reinterpret_cast<const Vector*>(p); }
inline void store(float* p, Vector v) { *reinterpret_cast<Vector*>(p) = v; }

inline float widen_half(std::uint16_t half) {
    // Integers for all but the subnormal, which get an exponent and lose what it stands for by an exact
    // subtraction. No binary32 here is subnormal: callers may have switched those off (flush to zero).
    const std::uint32_t magnitude = static_cast<std::uint32_t>(half & 0x7fffu) << 13;
    const std::uint32_t raised = magnitude + 0x38800000u;
    float small;
    std::memcpy(&small, &raised, 4);
    small -= 0x1p-14f;
    std::uint32_t bits;
    std::memcpy(&bits, &small, 4);
    bits = magnitude < 0x00800000u ? bits : magnitude + 0x38000000u;
    bits |= magnitude >= 0x0f800000u ? 0x7f800000u : 0u;  // infinities and NaN
    bits |= static_cast<std::uint32_t>(half & 0x8000u) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline std::uint16_t narrow_half(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds beyond 65504
    if (bits < 0x38800000u) {
        // Subnormal: adding 0.5 aligns the last place with binary16's, and rounds.
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        std::memcpy(&bits, &magnitude, 4);
        return static_cast<std::uint16_t>(sign | (bits - 0x3f000000u));
    }
    bits += 0xfffu + ((bits >> 13) & 1u);
    return static_cast<std::uint16_t>(sign | ((bits - 0x38000000u) >> 13));
}

inline std::uint16_t narrow_bf16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits += 0x7fffu + ((bits >> 16) & 1u);
    return static_cast<std::uint16_t>(bits >> 16);
}

inline float widen_bf16(std::uint16_t half) {
    const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

template <FloatType type>
inline float element(const std::uint8_t* token, std::size_t i) {
    if constexpr (type == FloatType::f16) {
        std::uint16_t half;
        std::memcpy(&half, token + 2 * i, 2);
        return widen_half(half);
    } else if constexpr (type == FloatType::f32) {
        float value;
        std::memcpy(&value, token + 4 * i, 4);
        return value;
    } else {
        double value;
        std::memcpy(&value, token + 8 * i, 8);
        return static_cast<float>(value);
    }
}

// Brings 16 tokens side by side, [dim][16]; missing ones repeat the first. 16 elements of each at a time, so that
// both sides stay in a few cache lines.
template <FloatType type>
inline void gather(const EncodeRun& run, std::size_t first, std::size_t tokens, float* values) {
    constexpr std::size_t bytes = type == FloatType::f16 ? 2 : type == FloatType::f32 ? 4 : 8;
    const std::size_t dim = run.dim;
    const std::uint8_t* token[kLanes];
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        token[lane] = run.tokens + (first + (lane < tokens ? lane : 0)) * dim * bytes;
    }
    for (std::size_t start = 0; start < dim; start += 16) {
        alignas(64) float tile[16][kLanes];
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
#if defined(__F16C__)
            if constexpr (type == FloatType::f16) {  // exact as well, and never flushes
                for (std::size_t i = 0; i < 16; i += 8) {
                    __m128i halves;
                    std::memcpy(&halves, token[lane] + 2 * (start + i), sizeof halves);
                    const __m256 wide = _mm256_cvtph_ps(halves);
                    std::memcpy(&tile[lane][i], &wide, sizeof wide);
                }
                continue;
            }
#endif
            for (std::size_t i = 0; i < 16; ++i) tile[lane][i] = element<type>(token[lane], start + i);
        }
        for (std::size_t i = 0; i < 16; ++i) {
            for (std::size_t lane = 0; lane < kLanes; ++lane) values[kLanes * (start + i) + lane] = tile[lane][i];
        }
    }
}

// What isn't a number (a rotation that overflowed, of vectors that should have had scales) bounds nothing: infinity.
inline float rounded_up(double value) {
    return value <= 0x1p127 ? nextafterf(static_cast<float>(value), HUGE_VALF) : HUGE_VALF;
}

// Rotates [dim][16] in `now`; `spare` is as large. Returns where the result is.
inline float* rotate(const EncodeRun& run, float* now, float* spare) {
    for (std::size_t r = 0; r < run.round_count; ++r) {
        const RotationView& round = run.rounds[r];
        for (std::size_t i = 0; i < run.dim; ++i) {
            const float* row = now + kLanes * (round.from ? round.from[i] : i);
            for (std::size_t lane = 0; lane < kLanes; lane += kWidth) {
                store(spare + kLanes * i + lane, round.sign[i] * load(row + lane));
            }
        }
        for (std::size_t h = 1; h < run.block; h *= 2) {
            for (std::size_t start = 0; start < run.dim; start += 2 * h) {
                float* const low = spare + kLanes * start;
                float* const high = low + kLanes * h;
                for (std::size_t i = 0; i < kLanes * h; i += kWidth) {
                    const Vector a = load(low + i), b = load(high + i);
                    store(low + i, a + b);
                    store(high + i, a - b);
                }
            }
        }
        float* const other = now;
        now = spare;
        spare = other;
    }
    const std::size_t count = kLanes * run.dim;
    for (std::size_t i = 0; i < count; ++i) now[i] *= run.rotation_scale;
    return now;
}

// Integer codes of [dim][16] rotated values; distances squared to what they stand for.
inline void quantise(const EncodeRun& run, const float* values, std::size_t first, std::size_t tokens,
                     double* distances) {
    const float inverse = 1.0f / run.step;
    const std::size_t half = run.dim / 2;
    const bool wide = run.codec == Codec::int8;
    std::uint8_t level[kLanes];
    for (std::size_t i = 0; i < run.dim; ++i) {
        const float* row = values + kLanes * i;
        float value[kLanes];
        if (wide) {
            for (std::size_t lane = 0; lane < kLanes; ++lane) {
                float t = row[lane] * inverse;
                t = t < 127.0f ? t : 127.0f;
                t = t > -127.0f ? t : -127.0f;
                // Adding 1.5 * 2^23 leaves no room for a fraction: rounded to nearest, ties to even.
                const float shifted = t + 12582912.0f;
                const float v = shifted - 12582912.0f;
                level[lane] = static_cast<std::uint8_t>(static_cast<std::int32_t>(v) + 128);
                value[lane] = v * run.step;
            }
        } else {
            for (std::size_t lane = 0; lane < kLanes; ++lane) {
                // The nearest odd level v = 2 u - 15.
                float t = row[lane] * inverse * 0.5f + 8.0f;
                t = t < 15.5f ? t : 15.5f;
                t = t > 0.5f ? t : 0.5f;
                const auto u = static_cast<std::int32_t>(t);
                level[lane] = static_cast<std::uint8_t>(u);
                value[lane] = static_cast<float>(2 * u - 15) * run.step;
            }
        }
        if (distances) {
            for (std::size_t lane = 0; lane < kLanes; ++lane) {
                const double off = static_cast<double>(row[lane]) - static_cast<double>(value[lane]);
                distances[lane] += off * off;
            }
        }
        if (wide) {
            std::uint8_t* to = run.codes + first * run.dim + i;
            for (std::size_t lane = 0; lane < tokens; ++lane) to[lane * run.dim] = level[lane];
        } else if (i < half) {
            std::uint8_t* to = run.codes + first * half + i;
            for (std::size_t lane = 0; lane < tokens; ++lane) to[lane * half] = level[lane];
        } else {
            std::uint8_t* to = run.codes + first * half + (i - half);
            for (std::size_t lane = 0; lane < tokens; ++lane) {
                to[lane * half] = static_cast<std::uint8_t>(to[lane * half] | level[lane] << 4);
            }
        }
    }
}

inline void store_floats(const EncodeRun& run, const float* values, std::size_t first, std::size_t tokens,
                         double* distances) {
    const std::size_t bytes = code_bytes(run.codec, run.dim);
    for (std::size_t lane = 0; lane < tokens; ++lane) {
        std::uint8_t* to = run.codes + (first + lane) * bytes;
        double distance = 0.0;
        for (std::size_t i = 0; i < run.dim; ++i) {
            const float value = values[kLanes * i + lane];
            float kept = value;
            if (run.codec == Codec::f32) {
                std::memcpy(to + 4 * i, &value, 4);
            } else if (run.codec == Codec::bf16) {
                const std::uint16_t narrow = narrow_bf16(value);
                kept = widen_bf16(narrow);
                std::memcpy(to + 2 * i, &narrow, 2);
            } else {
                const std::uint16_t narrow = narrow_half(value);
                kept = widen_half(narrow);
                std::memcpy(to + 2 * i, &narrow, 2);
            }
            const double off = static_cast<double>(value) - static_cast<double>(kept);
            distance += off * off;
        }
        if (distances) distances[lane] = distance;
    }
}

inline void encode_run(const EncodeRun& run) {
    const bool integer = is_integer(run.codec);
    for (std::size_t first = 0; first < run.count; first += kLanes) {
        const std::size_t tokens = run.count - first < kLanes ? run.count - first : kLanes;
        float* values = run.scratch;
        float* spare = run.scratch + kLanes * run.dim;
        switch (run.type) {
            case FloatType::f16: gather<FloatType::f16>(run, first, tokens, values); break;
            case FloatType::f32: gather<FloatType::f32>(run, first, tokens, values); break;
            case FloatType::f64: gather<FloatType::f64>(run, first, tokens, values); break;
        }
        double norms[kLanes] = {};
        for (std::size_t i = 0; i < run.dim; ++i) {
            for (std::size_t lane = 0; lane < kLanes; ++lane) {
                const double value = values[kLanes * i + lane];
                norms[lane] += value * value;
            }
        }
        if (run.norms) {
            for (std::size_t lane = 0; lane < tokens; ++lane) run.norms[first + lane] = norms[lane];
        }
        if (!run.codes) continue;
        double distances[kLanes] = {};
        double* const wanted = run.errors ? distances : nullptr;
        if (!integer) {
            store_floats(run, values, first, tokens, wanted);
        } else {
            if (run.scales) {
                float scale[kLanes];
                for (std::size_t lane = 0; lane < kLanes; ++lane) {
                    scale[lane] = static_cast<float>(std::sqrt(norms[lane]));
                    if (lane < tokens) run.scales[first + lane] = scale[lane];
                }
                for (std::size_t i = 0; i < run.dim; ++i) {
                    for (std::size_t lane = 0; lane < kLanes; ++lane) values[kLanes * i + lane] /= scale[lane];
                }
            }
            quantise(run, rotate(run, values, spare), first, tokens, wanted);
        }
        if (run.errors) {
            // What rounding may add: in here and in whoever undoes the rotation, and of a binary64 input.
            constexpr double kRounding = 160 * 0x1p-24;
            // Of numbers below binary32's normal range, each of up to 4096 elements by half of 2^-149 at every step.
            constexpr double kUnderflow = 0x1p-140;
            for (std::size_t lane = 0; lane < tokens; ++lane) {
                const bool scaled = integer && run.scales;
                const double norm = scaled ? 1.0 : std::sqrt(norms[lane]);
                const double distance = std::sqrt(distances[lane]) * (1 + 0x1p-30);
                const bool rounds = integer || run.type == FloatType::f64;
                const double scale = scaled ? static_cast<double>(run.scales[first + lane]) : 1.0;
                const double allowance = (norm + distance) * kRounding + kUnderflow / scale;
                run.errors[first + lane] =
                    distance == 0.0 && !rounds ? 0.0f : rounded_up(distance + (rounds ? allowance : 0.0));
            }
        }
    }
}

}  // namespace
}  // namespace phasemesh::kernels
