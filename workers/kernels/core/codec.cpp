#include "codec.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "cpu.hpp"
#include "encode.hpp"
#include "queries.hpp"
#include "rotation.hpp"

namespace phasemesh::kernels {
namespace {

// Tokens that are worth a thread of their own.
constexpr std::size_t kThreadTokens = 4096;

Encoder encoder(Isa isa) {
    [[maybe_unused]] const Isa level = resolve(isa);
#if defined(PHASEMESH_HAVE_AVX512)
    if (level >= Isa::avx512) return encode_avx512;
#endif
#if defined(PHASEMESH_HAVE_AVX2)
    if (level >= Isa::avx2) return encode_avx2;
#endif
    return encode_portable;
}

// Runs work(begin, end) over parts of 0..count, each a multiple of 16 but the last.
template <class Work>
void in_parts(std::size_t count, int threads, Work work) {
    if (threads < 1) throw ArgumentError("threads: must be at least 1");
    const std::size_t useful = std::clamp<std::size_t>(count / kThreadTokens, 1, static_cast<std::size_t>(threads));
    const std::size_t part = (count / useful + 15) / 16 * 16 + 16;
    std::vector<std::thread> others;
    others.reserve(useful);  // from here on nothing throws past a running thread
    std::exception_ptr failure;
    std::mutex failing;
    const auto guarded = [&](std::size_t begin) {
        try {
            work(begin, std::min(begin + part, count));
        } catch (...) {
            const std::lock_guard<std::mutex> hold(failing);
            if (!failure) failure = std::current_exception();
        }
    };
    for (std::size_t begin = part; begin < count; begin += part) {
        try {
            others.emplace_back(guarded, begin);
        } catch (const std::system_error&) {
            guarded(begin);  // the system gives no more threads
        }
    }
    guarded(0);
    for (std::thread& other : others) other.join();
    if (failure) std::rethrow_exception(failure);
}

std::size_t float_bytes(FloatType type) {
    return type == FloatType::f16 ? 2 : type == FloatType::f32 ? 4 : 8;
}

void check_dim(std::size_t dim) {
    if (dim == 0 || dim % kDimStep || dim > kMaxDim) {
        throw ArgumentError("tokens: dimension " + std::to_string(dim) + " is no multiple of 16 up to 4096");
    }
}

void check_offsets(const std::int64_t* offsets, std::size_t documents, std::size_t count) {
    if (offsets[0] < 0 || offsets[documents] < 0 || static_cast<std::uint64_t>(offsets[documents]) > count) {
        throw ArgumentError("offsets: run from " + std::to_string(offsets[0]) + " to " +
                            std::to_string(offsets[documents]) + ", beyond 0 to " + std::to_string(count));
    }
    for (std::size_t i = 0; i < documents; ++i) {
        if (offsets[i + 1] < offsets[i]) {
            throw ArgumentError("offsets: fall at " + std::to_string(i) + "; they must ascend");
        }
    }
}

}  // namespace

// c, in units of 1 / sqrt(dim), the standard deviation of an element of a random unit vector.
//
// int4: where the squared error of a uniform quantiser is least. Measured over 4 million elements of uniformly
// random unit vectors per dimension on a grid of 0.05, and fitted; rotated token vectors of a real encoder have
// theirs at the same place.
//
//   dim      16    32    48    64    96   128   320   768  1024  4096
//   best    2.3   2.4  2.45  2.45   2.5   2.5   2.5   2.5   2.5   2.5       2.5 - 3.2 / dim
//
// int8: where the largest error among a document's 120 tokens is least on average, for that is what bounds of
// scores are made of. At the squared optimum (3.2 to 3.9) a few elements per document are clipped, and the worst
// token of a document is off by twice as much; here the root mean square is 9 to 16 % above its optimum (22 % at
// 16). Measured alike, on a grid of 0.2: 4.2 at 48, 4.4 at 128 (real vectors too), 4.8 at 1024.
float clip(Codec codec, std::size_t dim) {
    const double d = static_cast<double>(dim);
    int doublings = 0;  // floor(log2(dim)), without a logarithm that machines round differently
    while (dim >> (doublings + 1)) ++doublings;
    const double c = codec == Codec::int4 ? 2.5 - 3.2 / d : 3.45 + 0.135 * doublings;
    return static_cast<float>(c / std::sqrt(d));
}

float step(Codec codec, std::size_t dim) { return clip(codec, dim) / (codec == Codec::int4 ? 15.0f : 127.0f); }

EncodeResult encode(const void* tokens, FloatType type, std::size_t count, std::size_t dim, Codec codec,
                    std::uint64_t seed, const std::int64_t* offsets, std::size_t documents, int threads, Isa isa,
                    std::uint8_t* codes, float* scales, float* errors) {
    check_dim(dim);
    if (scales && !is_integer(codec)) throw ArgumentError("scales: only int8 and int4 codes have scales");
    if (offsets) check_offsets(offsets, documents, count);
    const Rotation rotation(dim, seed);
    std::vector<RotationView> rounds;
    for (const auto& round : rotation.state().rounds) {
        rounds.push_back({round.from.empty() ? nullptr : round.from.data(), round.sign.data()});
    }
    const Encoder run = encoder(isa);
    const std::size_t bytes = code_bytes(codec, dim);
    std::vector<double> norms(count);
    in_parts(count, threads, [&](std::size_t begin, std::size_t end) {
        if (begin >= end) return;
        const Aligned scratch(2 * dim * 16 * sizeof(float));
        EncodeRun work{};
        work.tokens = static_cast<const std::uint8_t*>(tokens) + begin * dim * float_bytes(type);
        work.type = type;
        work.count = end - begin;
        work.dim = dim;
        work.codec = codec;
        work.step = is_integer(codec) ? step(codec, dim) : 1.0f;
        work.rounds = rounds.data();
        work.round_count = rounds.size();
        work.block = rotation.state().block;
        work.rotation_scale = rotation.state().scale;
        work.codes = codes + begin * bytes;
        work.scales = scales ? scales + begin : nullptr;
        work.errors = errors ? errors + begin : nullptr;
        work.norms = norms.data() + begin;
        work.scratch = scratch.as<float>();
        run(work);
    });

    EncodeResult result;
    // Half the largest binary16's last place rounds to infinity, which no codec of floats may make of a number.
    const auto flawed = [&](std::size_t token, Flaw& flaw) {
        if (!std::isfinite(norms[token])) {
            flaw = Flaw::not_finite;
            return true;
        }
        // A shorter vector has no element that could.
        const double safe = codec == Codec::bf16 ? 3e38 : 65000.0;
        if (!is_integer(codec) && norms[token] > safe * safe) {
            const std::uint8_t* code = codes + token * bytes;
            const std::uint16_t infinite = codec == Codec::bf16 ? 0x7f80u : 0x7c00u;
            for (std::size_t i = 0; codec != Codec::f32 && i < dim; ++i) {
                std::uint16_t half;
                std::memcpy(&half, code + 2 * i, 2);
                if ((half & infinite) == infinite) {
                    flaw = Flaw::not_finite;
                    return true;
                }
            }
        }
        // So short that its length is no binary32 above zero: there is no direction to encode.
        if (norms[token] == 0.0 || (is_integer(codec) && static_cast<float>(std::sqrt(norms[token])) == 0.0f)) {
            flaw = Flaw::zero_norm;
            return true;
        }
        if (scales && !std::isfinite(scales[token])) {
            flaw = Flaw::not_finite;
            return true;
        }
        if (std::fabs(norms[token] - 1.0) > kUnitTolerance) result.unit = false;
        return false;
    };
    const auto blank = [&](std::size_t begin, std::size_t end) {
        std::memset(codes + begin * bytes, 0, (end - begin) * bytes);
        if (scales) std::fill(scales + begin, scales + end, 0.0f);
        if (errors) std::fill(errors + begin, errors + end, 0.0f);
    };
    const std::size_t groups = offsets ? documents : count;
    std::size_t covered = 0;
    const auto visit = [&](std::size_t begin, std::size_t end, std::int64_t document) {
        bool refused = false;
        for (std::size_t token = begin; token < end; ++token) {
            Flaw flaw{};
            if (!flawed(token, flaw)) continue;
            if (document < 0) {
                blank(token, token + 1);  // outside every document: nobody to refuse
            } else if (!refused) {
                result.refused.push_back({document, static_cast<std::int64_t>(token), flaw});
                refused = true;
            }
        }
        if (refused) blank(begin, end);
    };
    for (std::size_t i = 0; i < groups; ++i) {
        const std::size_t begin = offsets ? static_cast<std::size_t>(offsets[i]) : i;
        const std::size_t end = offsets ? static_cast<std::size_t>(offsets[i + 1]) : i + 1;
        if (begin > covered) visit(covered, begin, -1);
        visit(begin, end, static_cast<std::int64_t>(i));
        covered = std::max(covered, end);
    }
    if (covered < count) visit(covered, count, -1);
    if (!is_integer(codec)) result.unit = true;
    return result;
}

bool all_unit(const void* tokens, FloatType type, std::size_t count, std::size_t dim, int threads, Isa isa) {
    check_dim(dim);
    const Encoder run = encoder(isa);
    std::vector<double> norms(count);
    in_parts(count, threads, [&](std::size_t begin, std::size_t end) {
        if (begin >= end) return;
        const Aligned scratch(dim * 16 * sizeof(float));
        EncodeRun work{};
        work.tokens = static_cast<const std::uint8_t*>(tokens) + begin * dim * float_bytes(type);
        work.type = type;
        work.count = end - begin;
        work.dim = dim;
        work.norms = norms.data() + begin;
        work.scratch = scratch.as<float>();
        run(work);
    });
    return std::all_of(norms.begin(), norms.end(), [](double norm) {
        return !std::isfinite(norm) || norm == 0.0 || std::fabs(norm - 1.0) <= kUnitTolerance;
    });
}

void decode(const std::uint8_t* codes, std::size_t count, std::size_t dim, Codec codec, std::uint64_t seed,
            const float* scales, int threads, float* out) {
    check_dim(dim);
    if (scales && !is_integer(codec)) throw ArgumentError("scales: only int8 and int4 codes have scales");
    const Rotation rotation(dim, seed);
    const std::size_t bytes = code_bytes(codec, dim);
    const float unit = is_integer(codec) ? step(codec, dim) : 1.0f;
    in_parts(count, threads, [&](std::size_t begin, std::size_t end) {
        for (std::size_t token = begin; token < end; ++token) {
            const std::uint8_t* code = codes + token * bytes;
            float* row = out + token * dim;
            for (std::size_t i = 0; i < dim; ++i) {
                switch (codec) {
                    case Codec::int8: row[i] = static_cast<float>(code[i] - 128) * unit; break;
                    case Codec::int4: {
                        const std::size_t half = dim / 2;
                        const int level = i < half ? code[i] & 0xf : code[i - half] >> 4;
                        row[i] = static_cast<float>(2 * level - 15) * unit;
                        break;
                    }
                    case Codec::bf16: {
                        std::uint16_t narrow;
                        std::memcpy(&narrow, code + 2 * i, 2);
                        const std::uint32_t wide = static_cast<std::uint32_t>(narrow) << 16;
                        std::memcpy(row + i, &wide, 4);
                        break;
                    }
                    case Codec::f16: {
                        std::uint16_t half;
                        std::memcpy(&half, code + 2 * i, 2);
                        // Without subnormal binary32, as in encoding.
                        const std::uint32_t magnitude = static_cast<std::uint32_t>(half & 0x7fffu) << 13;
                        const std::uint32_t raised = magnitude + 0x38800000u;
                        float small;
                        std::memcpy(&small, &raised, 4);
                        small -= 0x1p-14f;
                        std::uint32_t wide;
                        std::memcpy(&wide, &small, 4);
                        wide = magnitude < 0x00800000u ? wide : magnitude + 0x38000000u;
                        wide |= magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
                        wide |= static_cast<std::uint32_t>(half & 0x8000u) << 16;
                        std::memcpy(row + i, &wide, 4);
                        break;
                    }
                    case Codec::f32: std::memcpy(row + i, code + 4 * i, 4); break;
                }
            }
            if (!is_integer(codec)) continue;
            rotation.backward(row, 1, row);
            if (scales) {
                for (std::size_t i = 0; i < dim; ++i) row[i] *= scales[token];
            }
        }
    });
}

}  // namespace phasemesh::kernels
