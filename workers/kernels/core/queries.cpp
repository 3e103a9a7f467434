// Makes queries ready: rotation, quantisation, packing.
//
// For integer codecs a query is quantised to 8 bits with one scale of its own, its largest rotated element, so
// that nothing is clipped and sums over its tokens stay integers. Powers of two are taken out first: no query
// that float32 can hold over- or underflows on the way.
#include "queries.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "codec.hpp"
#include "cpu.hpp"
#include "rotation.hpp"

namespace phasemesh::kernels {
namespace {

std::uint16_t to_bf16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits += 0x7fffu + ((bits >> 16) & 1u);  // to nearest, ties to even
    const auto half = static_cast<std::uint16_t>(bits >> 16);
    // Finite stays finite: the largest float32 would round to infinity.
    return (half & 0x7fffu) == 0x7f80u ? static_cast<std::uint16_t>(half - 1) : half;
}

// Where element i of column c lies in a panel of `Pack`s with E bytes per element.
std::uint8_t* slot(std::uint8_t* data, std::size_t steps, std::size_t column, std::size_t element,
                   std::size_t element_bytes) {
    const std::size_t per_step = 4 / element_bytes;
    return data + ((column / kGroup) * steps + element / per_step) * 64 + (column % kGroup) * 4 +
           (element % per_step) * element_bytes;
}


// One query in 8-bit integers.
struct Quantised {
    std::vector<std::int8_t> integers;  // [tokens, dim], of the rotated tokens
    double unit = 0.0;                  // value of one step
    std::vector<float> errors;          // [tokens], as of `query_errors`; only where asked for
};

Quantised quantise(const Query& query, std::size_t dim, const Rotation& rotation, bool with_errors) {
    Quantised result;
    const std::size_t count = query.tokens * dim;
    result.integers.assign(count, 0);
    if (with_errors) result.errors.assign(query.tokens, 0.0f);
    float largest = 0.0f;
    for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(query.data[i]));
    if (largest == 0.0f) return result;
    int exponent = 0;
    std::frexp(largest, &exponent);
    std::vector<float> rows(count);
    for (std::size_t i = 0; i < count; ++i) {
        rows[i] = static_cast<float>(std::ldexp(static_cast<double>(query.data[i]), -exponent));
    }
    rotation.forward(rows.data(), query.tokens, rows.data());
    largest = 0.0f;
    for (const float value : rows) largest = std::max(largest, std::fabs(value));
    if (largest == 0.0f) return result;
    const double inverse = 127.0 / static_cast<double>(largest), unit = static_cast<double>(largest) / 127.0;
    for (std::size_t i = 0; i < count; ++i) {
        result.integers[i] = static_cast<std::int8_t>(std::nearbyint(static_cast<double>(rows[i]) * inverse));
    }
    result.unit = std::ldexp(unit, exponent);
    for (std::size_t t = 0; with_errors && t < query.tokens; ++t) {
        double off = 0.0, norm = 0.0;
        for (std::size_t i = t * dim; i < (t + 1) * dim; ++i) {
            const double value = rows[i], rest = value - result.integers[i] * unit;
            off += rest * rest;
            norm += value * value;
        }
        // Plus what may have underflowed as powers of two were taken out.
        const double error = std::sqrt(off) * (1 + 0x1p-30) + std::sqrt(norm) * kRotationError + 0x1p-120;
        result.errors[t] = std::nextafter(static_cast<float>(std::ldexp(error, exponent)), HUGE_VALF);
    }
    return result;
}

void check_dim(std::size_t dim) {
    if (dim == 0 || dim % kDimStep || dim > kMaxDim) {
        throw ArgumentError("query: dimension " + std::to_string(dim) + " is no multiple of 16 up to 4096");
    }
}

void check_query(const Query& query, std::size_t dim, const std::string& which) {
    if (query.tokens < 1 || query.tokens > kMaxQueryTokens) {
        throw ArgumentError(which + ": has " + std::to_string(query.tokens) + " tokens, expected 1 to " +
                            std::to_string(kMaxQueryTokens));
    }
    for (std::size_t i = 0; i < query.tokens * dim; ++i) {
        if (!std::isfinite(query.data[i])) {
            throw ArgumentError(which + ": token " + std::to_string(i / dim) + " isn't finite");
        }
    }
}

}  // namespace

std::shared_ptr<const PreparedQueries> prepare(const std::vector<Query>& queries, std::size_t dim, Codec codec,
                                               std::uint64_t seed, bool scaled, Isa isa) {
    check_dim(dim);
    if (scaled && !is_integer(codec)) throw ArgumentError("scales: only int8 and int4 codes have scales");
    if (queries.empty()) throw ArgumentError("queries: needs at least one");
    auto ready = std::make_shared<PreparedQueries>();
    ready->dim = dim;
    ready->codec = codec;
    ready->seed = seed;
    ready->scaled = scaled;
    ready->level = resolve(isa);
    const Engine& code = engine(codec, ready->level);

    ready->starts.push_back(0);
    for (std::size_t q = 0; q < queries.size(); ++q) {
        const std::string which = queries.size() == 1 ? "query" : "queries[" + std::to_string(q) + "]";
        check_query(queries[q], dim, which);
        ready->starts.push_back(ready->starts.back() + queries[q].tokens);
    }

    const std::size_t element_bytes = pack_bytes(code.pack);
    Panel& panel = ready->panel;
    panel.groups = (ready->columns() + kGroup - 1) / kGroup;
    panel.steps = dim * element_bytes / 4;
    panel.shift = code.shift;
    ready->memory = Aligned(panel.groups * panel.steps * 64);
    std::uint8_t* data = ready->memory.as<std::uint8_t>();
    std::memset(data, 0, ready->memory.size());
    panel.data = data;
    ready->corrections.assign(panel.groups * kGroup, 0);
    panel.corrections = ready->corrections.data();

    if (!is_integer(codec)) {
        double most = 0.0;
        for (const Query& query : queries) {
            for (std::size_t i = 0; i < query.tokens * dim; ++i) {
                most = std::max(most, std::fabs(static_cast<double>(query.data[i])));
            }
        }
        // bfloat16 may round a query's element up by 2^-8.
        const double reach = 3.4028e38 / (1.01 * most * static_cast<double>(dim) + 1e-300);
        if (reach < static_cast<double>(ready->largest)) ready->largest = static_cast<float>(reach);
        for (std::size_t q = 0; q < queries.size(); ++q) {
            ready->factors.push_back(1.0);
            ready->zero_sums.push_back(0);
            for (std::size_t t = 0; t < queries[q].tokens; ++t) {
                for (std::size_t i = 0; i < dim; ++i) {
                    std::uint8_t* to = slot(data, panel.steps, ready->starts[q] + t, i, element_bytes);
                    float value = queries[q].data[t * dim + i];
                    // A bf16 query is rounded at every level, or levels would differ by more than the order of sums.
                    const std::uint16_t half = to_bf16(value);
                    if (code.pack == Pack::bf16x2) {
                        std::memcpy(to, &half, 2);
                        continue;
                    }
                    if (codec == Codec::bf16) {
                        const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
                        std::memcpy(&value, &bits, 4);
                    }
                    std::memcpy(to, &value, 4);
                }
            }
        }
        return ready;
    }

    const Rotation rotation(dim, seed);
    for (std::size_t q = 0; q < queries.size(); ++q) {
        const Quantised quantised = quantise(queries[q], dim, rotation, false);
        ready->factors.push_back(quantised.unit * static_cast<double>(step(codec, dim)));
        std::int64_t zero_sum = 0;
        for (std::size_t t = 0; t < queries[q].tokens; ++t) {
            const std::size_t column = ready->starts[q] + t;
            std::int32_t sum = 0;
            for (std::size_t i = 0; i < dim; ++i) {
                const std::int8_t value = quantised.integers[t * dim + i];
                sum += value;
                std::uint8_t* to = slot(data, panel.steps, column, i, element_bytes);
                if (element_bytes == 1) {
                    std::memcpy(to, &value, 1);
                } else {
                    const std::int16_t wide = value;
                    std::memcpy(to, &wide, 2);
                }
            }
            ready->corrections[column] = code.zero * sum;
            zero_sum += ready->corrections[column];
        }
        ready->zero_sums.push_back(zero_sum);
    }
    return ready;
}

std::vector<float> query_errors(const Query& query, std::size_t dim, Codec codec, std::uint64_t seed) {
    check_dim(dim);
    check_query(query, dim, "query");
    if (is_integer(codec)) return quantise(query, dim, Rotation(dim, seed), true).errors;
    std::vector<float> errors(query.tokens, 0.0f);
    if (codec != Codec::bf16) return errors;
    for (std::size_t t = 0; t < query.tokens; ++t) {
        double off = 0.0;
        for (std::size_t i = t * dim; i < (t + 1) * dim; ++i) {
            const std::uint32_t bits = static_cast<std::uint32_t>(to_bf16(query.data[i])) << 16;
            float rounded;
            std::memcpy(&rounded, &bits, 4);
            const double rest = static_cast<double>(query.data[i]) - static_cast<double>(rounded);
            off += rest * rest;
        }
        errors[t] = std::nextafter(static_cast<float>(std::sqrt(off) * (1 + 0x1p-30)), HUGE_VALF);
    }
    return errors;
}

}  // namespace phasemesh::kernels
