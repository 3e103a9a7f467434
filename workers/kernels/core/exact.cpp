#include "exact.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cpu.hpp"
#include "micro.hpp"
#include "queries.hpp"

namespace phasemesh::kernels {
namespace {

using Clock = std::chrono::steady_clock;

// Rows of a piece in scan form, and similarities that are kept of it: both stay in near caches.
constexpr std::size_t kPieceBytes = 16 * 1024;
constexpr std::size_t kKeptBytes = 128 * 1024;
// Products of two elements between two looks at the clock: some tenths of a millisecond.
constexpr std::int64_t kTickProducts = std::int64_t{1} << 24;
constexpr auto kCheckpointEvery = std::chrono::milliseconds(2);

const ExactCode& code_of([[maybe_unused]] Isa level) {
#if defined(PHASEMESH_HAVE_AVX512)
    if (level >= Isa::avx512) return exact_avx512();
#endif
#if defined(PHASEMESH_HAVE_AVX2)
    if (level >= Isa::avx2) return exact_avx2();
#endif
    return exact_portable();
}

// As `sum_lanes` of exact_impl.hpp adds, over any number of values.
double sum_exact(const double* values, std::size_t count) {
    double lanes[kLanes] = {};
    for (std::size_t i = 0; i < count; ++i) lanes[i % kLanes] += values[i];
    for (std::size_t l = 0; l < 4; ++l) lanes[l] += lanes[l + 4];
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

void check(const Query& query, const Documents& vectors, const PreparedQueries& queries, const Documents& scanned,
           const Selection& selection) {
    if (vectors.codec != Codec::f16) throw ArgumentError("tokens: float16 vectors are needed");
    if (scanned.codec != Codec::int8 && scanned.codec != Codec::f16) {
        throw ArgumentError("codec: int8 or f16 is needed");
    }
    if (queries.count() != 1 || queries.columns() != query.tokens || queries.dim != vectors.dim ||
        scanned.dim != vectors.dim || queries.codec != scanned.codec || queries.seed != scanned.seed ||
        queries.scaled != (scanned.scales != nullptr)) {
        throw ArgumentError("scan_query: was made ready for another query, codec, seed or scaling");
    }
    if (scanned.tokens != vectors.tokens) {
        throw ArgumentError("codes: there are " + std::to_string(scanned.tokens) + " for " +
                            std::to_string(vectors.tokens) + " tokens");
    }
    for (std::size_t i = 0; i < query.tokens * vectors.dim; ++i) {
        if (!std::isfinite(query.data[i])) {
            throw ArgumentError("query: token " + std::to_string(i / vectors.dim) + " isn't finite");
        }
    }
    if (selection.kind == Selection::Kind::mask) throw ArgumentError("select: document numbers are needed");
    for (std::int64_t i = 0; i < selection.results(); ++i) {
        const bool range = selection.kind == Selection::Kind::range;
        const std::int64_t document = range ? selection.start + i : selection.indices[i];
        if (document < 0 || document >= vectors.count) {
            throw ArgumentError("select: document " + std::to_string(document) + " is none of the " +
                                std::to_string(vectors.count));
        }
        const std::int64_t begin = vectors.offsets[document], end = vectors.offsets[document + 1];
        if (begin < 0 || end < begin || end > vectors.tokens) {
            throw ArgumentError("offsets: document " + std::to_string(document) + " has tokens " +
                                std::to_string(begin) + " to " + std::to_string(end) + " of " +
                                std::to_string(vectors.tokens));
        }
    }
}

// Where a vector's similarity has to reach, so that it may be the maximum: the largest less twice the bound.
std::int32_t floor_of(std::int32_t best, double bound) {
    const double floor = static_cast<double>(best) - std::ceil(2.0 * bound);
    // Not a number: a bound of infinity times nothing; everything reaches it, as where the bound is infinite.
    return floor >= static_cast<double>(std::numeric_limits<std::int32_t>::min())
               ? static_cast<std::int32_t>(floor)
               : std::numeric_limits<std::int32_t>::min();
}

float floor_of(float best, double bound) {
    const double floor = static_cast<double>(best) - 2.0 * bound;
    if (!(floor >= static_cast<double>(std::numeric_limits<float>::lowest()))) {
        return -std::numeric_limits<float>::infinity();
    }
    return std::nextafter(static_cast<float>(floor), -std::numeric_limits<float>::infinity());
}

template <class Element>
struct Scan {};

template <>
struct Scan<std::int32_t> {
    static constexpr std::int32_t kLowest = std::numeric_limits<std::int32_t>::min();
    static constexpr std::int32_t kNever = std::numeric_limits<std::int32_t>::max();
    static auto keep(const Engine& engine, bool) { return engine.keep_integer; }
    static auto reach(const ExactCode& code) { return code.reach_integer; }
};

template <>
struct Scan<float> {
    static constexpr float kLowest = -std::numeric_limits<float>::infinity();
    static constexpr float kNever = std::numeric_limits<float>::infinity();
    static auto keep(const Engine& engine, bool scaled) { return scaled ? engine.keep_scaled : engine.keep_floating; }
    static auto reach(const ExactCode& code) { return code.reach_float; }
};

template <class Element>
void score_all(const Query& query, const Documents& vectors, const PreparedQueries& queries,
               const Documents& scanned, const Bounds& bounds, const Selection& selection, const Options& options,
               double* scores) {
    const Engine& engine = kernels::engine(scanned.codec, queries.level);
    const ExactCode& code = code_of(queries.level);
    const auto keep = Scan<Element>::keep(engine, queries.scaled);
    const auto reach = Scan<Element>::reach(code);
    if (!keep) throw ArgumentError("isa: the level keeps no similarities");
    const std::size_t dim = vectors.dim, real = query.tokens, columns = queries.panel.groups * kGroup;
    const std::size_t vector_bytes = code_bytes(vectors.codec, dim);
    const std::size_t scan_bytes = code_bytes(scanned.codec, dim), row_bytes = dim * pack_bytes(engine.pack);
    const std::int64_t results = selection.results();
    const auto piece_tokens = static_cast<std::int64_t>(
        std::max<std::size_t>(16, std::min(kPieceBytes / row_bytes, kKeptBytes / (columns * sizeof(Element)))));
    // A similarity is that many times what the scan gives, but for a constant of its column.
    const double unit = queries.factors[0] *
                        (engine.integer && !queries.scaled ? static_cast<double>(1 << engine.shift) : 1.0);

    std::vector<double> wide_query(query.data, query.data + real * dim), wide(dim), exact(real);
    std::vector<Element> best(columns), floors(columns, Scan<Element>::kNever);
    // Near vectors of a piece: their tokens, and for each the query's tokens that it is near for.
    std::vector<std::int64_t> near_token(static_cast<std::size_t>(piece_tokens));
    std::vector<std::size_t> near_stop(static_cast<std::size_t>(piece_tokens));
    std::vector<std::int32_t> near(static_cast<std::size_t>(piece_tokens) * real);
    const Aligned kept(static_cast<std::size_t>(piece_tokens) * columns * sizeof(Element));
    const Aligned rows(engine.stage ? static_cast<std::size_t>(piece_tokens) * row_bytes : 0);
    if (options.checkpoint) options.checkpoint();
    auto last = Clock::now();
    std::int64_t done = 0;

    for (std::int64_t i = 0; i < results; ++i) {
        const bool range = selection.kind == Selection::Kind::range;
        const std::int64_t document = range ? selection.start + i : selection.indices[i];
        const std::int64_t begin = vectors.offsets[document], end = vectors.offsets[document + 1];
        if (begin == end) {
            scores[i] = -std::numeric_limits<double>::infinity();
            continue;
        }
        std::fill(best.begin(), best.end(), Scan<Element>::kLowest);
        std::fill(exact.begin(), exact.end(), -std::numeric_limits<double>::infinity());
        for (std::int64_t token = begin; token < end; token += piece_tokens) {
            Piece piece;
            piece.tokens = std::min(piece_tokens, end - token);
            piece.rows = scanned.codes + static_cast<std::size_t>(token) * scan_bytes;
            piece.before = token;
            piece.after = scanned.tokens - token - piece.tokens;
            piece.scales = scanned.scales ? scanned.scales + token : nullptr;
            if (engine.stage) {
                if (!std::isfinite(engine.stage(piece.rows, piece.tokens, dim, rows.as<std::uint8_t>()))) {
                    throw ArgumentError("tokens: document " + std::to_string(document) + " isn't finite");
                }
                piece.rows = rows.as<std::uint8_t>();
                piece.before = 0;
                piece.after = piece_tokens - piece.tokens;
            }
            keep(queries.panel, piece, best.data(), kept.as<Element>());
            // The largest so far is at most the largest of all, so nothing that may be the maximum falls short.
            for (std::size_t c = 0; c < real; ++c) {
                const double bound = bounds.spread[c] * bounds.reach[i] +
                                     bounds.spread[real + c] * bounds.reach[results + i];
                floors[c] = floor_of(best[c], bound / unit);
            }
            std::size_t tokens = 0, found = 0;
            for (std::int64_t t = 0; t < piece.tokens; ++t) {
                const Element* similarities = kept.as<Element>() + static_cast<std::size_t>(t) * columns;
                const std::size_t known = found;
                for (std::size_t first = 0; first < columns; first += kGroup) {
                    std::uint32_t mask = reach(similarities + first, floors.data() + first);
                    for (; mask; mask &= mask - 1) {
                        near[found++] = static_cast<std::int32_t>(first) + __builtin_ctz(mask);
                    }
                }
                if (found == known) continue;
                near_token[tokens] = token + t;
                near_stop[tokens++] = found;
                // Vectors lie far from their codes: all are asked for before the first is waited for.
                const std::uint8_t* vector = vectors.codes + static_cast<std::size_t>(token + t) * vector_bytes;
                for (std::size_t byte = 0; byte < vector_bytes; byte += 64) {
                    __builtin_prefetch(vector + byte, 0, 3);
                }
            }
            for (std::size_t n = 0; n < tokens; ++n) {
                const std::size_t first = n ? near_stop[n - 1] : 0;
                code.widen(vectors.codes + static_cast<std::size_t>(near_token[n]) * vector_bytes, dim, wide.data());
                code.raise(wide.data(), wide_query.data(), dim, near.data() + first, near_stop[n] - first,
                           exact.data());
            }
            done += piece.tokens * static_cast<std::int64_t>(columns * dim);
            if (done < kTickProducts) continue;
            done = 0;
            if (options.cancel && options.cancel->load(std::memory_order_relaxed)) throw Cancelled();
            if (!options.checkpoint || Clock::now() - last < kCheckpointEvery) continue;
            options.checkpoint();
            last = Clock::now();
        }
        const double sum = sum_exact(exact.data(), real);
        scores[i] = options.mean ? sum / static_cast<double>(real) : sum;
        if (!std::isfinite(scores[i])) {
            throw ArgumentError("tokens: document " + std::to_string(document) + " has no finite score");
        }
    }
}

}  // namespace

Isa exact_level(Isa limit) { return resolve(limit > Isa::avx512 ? Isa::avx512 : limit); }

void exact_maxsim(const Query& query, const Documents& vectors, const PreparedQueries& queries,
                  const Documents& scanned, const Bounds& bounds, const Selection& selection,
                  const Options& options, double* scores) {
    check(query, vectors, queries, scanned, selection);
    const bool integer = scanned.codec == Codec::int8 && !queries.scaled;
    (integer ? score_all<std::int32_t> : score_all<float>)(query, vectors, queries, scanned, bounds, selection,
                                                           options, scores);
}

}  // namespace phasemesh::kernels
