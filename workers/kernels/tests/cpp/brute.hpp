// MaxSim as its definition says it, in int64 and binary64, from the bytes of the codes; shares nothing with the
// library but the rotation, which has tests of its own, and the documented value of a quantiser's step.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "check.hpp"
#include "codec.hpp"
#include "scan.hpp"

namespace brute {

namespace pk = phasemesh::kernels;

inline const char* name(pk::Codec codec) {
    constexpr const char* names[] = {"int8", "int4", "bf16", "f16", "f32"};
    return names[static_cast<int>(codec)];
}

inline constexpr pk::Codec kCodecs[] = {pk::Codec::int8, pk::Codec::int4, pk::Codec::bf16, pk::Codec::f16,
                                        pk::Codec::f32};

struct Corpus {
    pk::Codec codec = pk::Codec::int8;
    std::size_t dim = 0;
    std::uint64_t seed = 7;
    std::vector<std::uint8_t> codes;
    std::vector<std::int64_t> offsets;
    std::vector<float> scales;  // empty for none

    std::int64_t count() const { return static_cast<std::int64_t>(offsets.size()) - 1; }
    std::size_t row() const { return pk::code_bytes(codec, dim); }
    pk::Documents view() const {
        pk::Documents d;
        d.codes = codes.data();
        d.tokens = static_cast<std::int64_t>(codes.size() / row());
        d.dim = dim;
        d.codec = codec;
        d.seed = seed;
        d.scales = scales.empty() ? nullptr : scales.data();
        d.offsets = offsets.data();
        d.count = count();
        return d;
    }
};

// A number of a float codec: mostly around 1, some subnormal, some zeros, both signs.
inline void put_random(check::Random& random, pk::Codec codec, std::uint8_t* to) {
    const std::uint64_t kind = random.below(40);
    const auto sign = static_cast<std::uint32_t>(random.below(2));
    if (codec == pk::Codec::f32) {
        float value = random.normal();
        if (kind == 0) value = sign ? -0.0f : 0.0f;
        if (kind == 1) value = static_cast<float>(random.below(1000)) * 0x1p-149f;
        std::memcpy(to, &value, 4);
        return;
    }
    const bool brain = codec == pk::Codec::bf16;
    const std::uint32_t mantissa_bits = brain ? 7 : 10;
    std::uint32_t exponent = (brain ? 118 : 6) + static_cast<std::uint32_t>(random.below(11));
    auto mantissa = static_cast<std::uint32_t>(random.below(1u << mantissa_bits));
    if (kind == 0) exponent = mantissa = 0;
    if (kind == 1) exponent = 0;
    const auto half = static_cast<std::uint16_t>(sign << 15 | exponent << mantissa_bits | mantissa);
    std::memcpy(to, &half, 2);
}

inline void put_random_token(check::Random& random, const Corpus& corpus, std::uint8_t* to) {
    if (pk::is_integer(corpus.codec)) {
        for (std::size_t i = 0; i < corpus.row(); ++i) to[i] = static_cast<std::uint8_t>(random.next() >> 24);
        return;
    }
    const std::size_t bytes = corpus.row() / corpus.dim;
    for (std::size_t i = 0; i < corpus.dim; ++i) put_random(random, corpus.codec, to + bytes * i);
}

// Documents of these lengths. Every fifth token repeats an earlier one, mostly of its own document: ties.
inline Corpus corpus(check::Random& random, pk::Codec codec, std::size_t dim, bool scaled,
                     const std::vector<std::int64_t>& lengths) {
    Corpus made;
    made.codec = codec;
    made.dim = dim;
    made.offsets = {0};
    for (const std::int64_t length : lengths) made.offsets.push_back(made.offsets.back() + length);
    const auto tokens = static_cast<std::size_t>(made.offsets.back());
    made.codes.resize(tokens * made.row());
    if (scaled) made.scales.resize(tokens);
    for (std::size_t t = 0; t < tokens; ++t) {
        std::uint8_t* const to = made.codes.data() + t * made.row();
        const bool repeats = t > 0 && t % 5 == 0;
        const std::size_t from = repeats ? t - 1 - random.below(std::min<std::size_t>(t, 20)) : t;
        if (repeats) {
            std::memcpy(to, made.codes.data() + from * made.row(), made.row());
        } else {
            put_random_token(random, made, to);
        }
        if (scaled) made.scales[t] = repeats ? made.scales[from] : std::fabs(random.normal()) * 3 + 0.01f;
    }
    return made;
}

struct Rows {
    std::vector<float> data;
    std::size_t tokens = 0;
    pk::Query view() const { return {data.data(), tokens}; }
};

inline Rows query(check::Random& random, std::size_t tokens, std::size_t dim) {
    Rows rows{std::vector<float>(tokens * dim), tokens};
    for (float& value : rows.data) value = random.normal();
    return rows;
}

// Element of a float code as a real number.
inline double element(const Corpus& corpus, std::size_t token, std::size_t i) {
    const std::uint8_t* const row = corpus.codes.data() + token * corpus.row();
    if (corpus.codec == pk::Codec::f32) {
        float value;
        std::memcpy(&value, row + 4 * i, 4);
        return value;
    }
    std::uint16_t half;
    std::memcpy(&half, row + 2 * i, 2);
    const bool brain = corpus.codec == pk::Codec::bf16;
    const int bits = brain ? 7 : 10, bias = brain ? 127 : 15;
    const int exponent = (half & 0x7fff) >> bits, mantissa = half & ((1 << bits) - 1);
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias - bits)
                                           : std::ldexp(mantissa + (1 << bits), exponent - bias - bits);
    return half & 0x8000 ? -magnitude : magnitude;
}

// Integer of a code as `Codec` documents it.
inline int level(const Corpus& corpus, std::size_t token, std::size_t i) {
    const std::uint8_t* const row = corpus.codes.data() + token * corpus.row();
    if (corpus.codec == pk::Codec::int8) return row[i] - 128;
    const std::size_t half = corpus.dim / 2;
    return 2 * (i < half ? row[i] & 15 : row[i - half] >> 4) - 15;
}

inline float as_bf16(float value) {
    // Among the two neighbours the nearer, of equals the even one.
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const std::uint32_t down = bits & 0xffff0000u, rest = bits & 0xffffu;
    const bool up = rest > 0x8000u || (rest == 0x8000u && (down & 0x10000u));
    const std::uint32_t rounded = up ? down + 0x10000u : down;
    std::memcpy(&value, &rounded, 4);
    return value;
}

struct Truth {
    std::vector<double> score;         // [n]; -inf for empty documents
    std::vector<double> bound;         // [n]; how far a path may be off. 0 for integer codecs
    std::vector<std::int32_t> best;    // [n, tokens]; the first of equals
    std::vector<double> dots;          // [all tokens, query tokens], float codecs
    std::vector<double> dot_bounds;    // likewise
};

inline Truth integers(const Corpus& corpus, const Rows& query) {
    const std::size_t dim = corpus.dim;
    // Powers of two first, then the rotation, then one step for the whole query.
    float largest = 0.0f;
    for (const float value : query.data) largest = std::max(largest, std::fabs(value));
    int exponent = 0;
    std::frexp(largest, &exponent);
    std::vector<float> rows(query.data.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
        rows[i] = static_cast<float>(std::ldexp(static_cast<double>(query.data[i]), -exponent));
    }
    pk::Rotation(dim, corpus.seed).forward(rows.data(), query.tokens, rows.data());
    double top = 0.0;
    for (const float value : rows) top = std::max(top, std::fabs(static_cast<double>(value)));
    std::vector<std::int32_t> columns(rows.size(), 0);
    for (std::size_t i = 0; i < rows.size() && top > 0.0; ++i) {
        columns[i] = static_cast<std::int32_t>(std::nearbyint(rows[i] * (127.0 / top)));
    }
    const double factor = std::ldexp(top / 127.0, exponent) * static_cast<double>(pk::step(corpus.codec, dim));

    Truth truth;
    std::vector<std::int32_t> row(dim);
    for (std::int64_t d = 0; d < corpus.count(); ++d) {
        const auto begin = static_cast<std::size_t>(corpus.offsets[d]);
        const auto end = static_cast<std::size_t>(corpus.offsets[d + 1]);
        std::vector<std::int64_t> sums(query.tokens, std::numeric_limits<std::int64_t>::min());
        std::vector<float> scaled(query.tokens, -std::numeric_limits<float>::infinity());
        std::vector<std::int32_t> best(query.tokens, -1);
        for (std::size_t t = begin; t < end; ++t) {
            for (std::size_t i = 0; i < dim; ++i) row[i] = level(corpus, t, i);
            for (std::size_t q = 0; q < query.tokens; ++q) {
                std::int64_t dot = 0;
                for (std::size_t i = 0; i < dim; ++i) {
                    dot += static_cast<std::int64_t>(row[i]) * columns[q * dim + i];
                }
                const bool with = !corpus.scales.empty();
                const float value = with ? static_cast<float>(dot) * corpus.scales[t] : 0.0f;
                if (with ? value > scaled[q] || best[q] < 0 : dot > sums[q]) {
                    sums[q] = dot;
                    scaled[q] = value;
                    best[q] = static_cast<std::int32_t>(t - begin);
                }
            }
        }
        double score = -std::numeric_limits<double>::infinity();
        if (begin < end && corpus.scales.empty()) {
            std::int64_t sum = 0;
            for (const std::int64_t one : sums) sum += one;
            score = static_cast<double>(sum) * factor;
        } else if (begin < end) {
            double sum = 0.0;
            for (const float one : scaled) sum += one;
            score = sum * factor;
        }
        truth.score.push_back(score);
        truth.bound.push_back(0.0);
        truth.best.insert(truth.best.end(), best.begin(), best.end());
    }
    return truth;
}

// Bounds: a dot product of n binary32 products, in any order and with or without fused steps, is off by at most
// n u / (1 - n u) times the sum of its products' magnitudes (Higham, Accuracy and Stability, 3.1), with one more
// for the product itself; and by what is flushed to zero, where an instruction does that to subnormals.
inline Truth floats(const Corpus& corpus, const Rows& query) {
    const std::size_t dim = corpus.dim;
    const double n = static_cast<double>(dim + 1) * 0x1p-24, gamma = n / (1 - n);
    std::vector<double> columns(query.data.size());
    for (std::size_t i = 0; i < columns.size(); ++i) {
        columns[i] = corpus.codec == pk::Codec::bf16 ? as_bf16(query.data[i]) : query.data[i];
    }
    Truth truth;
    const auto tokens = static_cast<std::size_t>(corpus.offsets.back());
    truth.dots.resize(tokens * query.tokens);
    truth.dot_bounds.resize(tokens * query.tokens);
    std::vector<double> row(dim);
    for (std::size_t t = 0; t < tokens; ++t) {
        for (std::size_t i = 0; i < dim; ++i) row[i] = element(corpus, t, i);
        for (std::size_t q = 0; q < query.tokens; ++q) {
            double dot = 0.0, magnitude = 0.0, flushed = 0.0;
            for (std::size_t i = 0; i < dim; ++i) {
                const double product = row[i] * columns[q * dim + i];
                dot += product;
                magnitude += std::fabs(product);
                flushed += 0x1p-126 * (2 + std::fabs(row[i]) + std::fabs(columns[q * dim + i]));
            }
            truth.dots[t * query.tokens + q] = dot;
            truth.dot_bounds[t * query.tokens + q] = gamma * magnitude + flushed;
        }
    }
    for (std::int64_t d = 0; d < corpus.count(); ++d) {
        const auto begin = static_cast<std::size_t>(corpus.offsets[d]);
        const auto end = static_cast<std::size_t>(corpus.offsets[d + 1]);
        double score = begin < end ? 0.0 : -std::numeric_limits<double>::infinity(), bound = 0.0;
        for (std::size_t q = 0; q < query.tokens; ++q) {
            std::int32_t best = -1;
            double top = 0.0, off = 0.0;
            for (std::size_t t = begin; t < end; ++t) {
                const double dot = truth.dots[t * query.tokens + q];
                off = std::max(off, truth.dot_bounds[t * query.tokens + q]);
                if (best < 0 || dot > top) {
                    top = dot;
                    best = static_cast<std::int32_t>(t - begin);
                }
            }
            score += top;
            bound += off;
            truth.best.push_back(best);
        }
        truth.score.push_back(score);
        truth.bound.push_back(begin < end ? bound * (1 + 0x1p-20) + std::fabs(score) * 0x1p-24 + 0x1p-149 : 0.0);
    }
    return truth;
}

inline Truth maxsim(const Corpus& corpus, const Rows& query) {
    return pk::is_integer(corpus.codec) ? integers(corpus, query) : floats(corpus, query);
}

}  // namespace brute
