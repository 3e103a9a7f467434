#include "scan.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "codec.hpp"
#include "cpu.hpp"
#include "micro.hpp"
#include "queries.hpp"

namespace phasemesh::kernels {
namespace {

using Clock = std::chrono::steady_clock;

// Rows of a piece in scan form take about this much: they stay in the first-level cache while every group of
// columns goes over them.
constexpr std::size_t kPieceBytes = 16 * 1024;
// Products of two elements between two looks at the clock: some tenths of a millisecond.
constexpr std::int64_t kTickProducts = std::int64_t{1} << 26;
// Products that are worth a thread of their own, whose start costs about 50 microseconds.
constexpr std::int64_t kThreadProducts = std::int64_t{1} << 25;
constexpr auto kCheckpointEvery = std::chrono::milliseconds(2);

// Of one document, so that a call that scores a few of many reads only theirs.
void check_document(const Documents& documents, std::int64_t i) {
    const std::int64_t begin = documents.offsets[i], end = documents.offsets[i + 1];
    if (end < begin) throw ArgumentError("offsets: fall at " + std::to_string(i) + "; they must ascend");
    if (begin < 0 || end > documents.tokens) {
        throw ArgumentError("offsets: document " + std::to_string(i) + " runs from " + std::to_string(begin) +
                            " to " + std::to_string(end) + ", beyond 0 to " + std::to_string(documents.tokens));
    }
    // Positions within a document are int32.
    if (end - begin > std::numeric_limits<std::int32_t>::max()) {
        throw ArgumentError("offsets: document " + std::to_string(i) + " has more than 2^31 - 1 tokens");
    }
    for (std::int64_t token = begin; documents.scales && token < end; ++token) {
        const float scale = documents.scales[token];
        if (!(scale >= 0.0f) || std::isinf(scale)) {
            throw ArgumentError("scales: token " + std::to_string(token) + " has " + std::to_string(scale) +
                                ", expected a finite length");
        }
    }
}

void check(const PreparedQueries& queries, const Documents& documents, const Selection& selection) {
    if (documents.dim != queries.dim || documents.codec != queries.codec || documents.seed != queries.seed ||
        (documents.scales != nullptr) != queries.scaled) {
        throw ArgumentError("queries: were made ready for another codec, dimension, seed or scaling");
    }
    if (documents.count < 0) throw ArgumentError("offsets: needs at least one entry");
    switch (selection.kind) {
        case Selection::Kind::range:
            if (selection.start < 0 || selection.stop < selection.start || selection.stop > documents.count) {
                throw ArgumentError("select: range " + std::to_string(selection.start) + " to " +
                                    std::to_string(selection.stop) + " leaves the " +
                                    std::to_string(documents.count) + " documents");
            }
            for (std::int64_t i = selection.start; i < selection.stop; ++i) check_document(documents, i);
            break;
        case Selection::Kind::indices:
            for (std::int64_t i = 0; i < selection.size; ++i) {
                if (selection.indices[i] < 0 || selection.indices[i] >= documents.count) {
                    throw ArgumentError("select: document " + std::to_string(selection.indices[i]) +
                                        " (entry " + std::to_string(i) + ") is none of the " +
                                        std::to_string(documents.count));
                }
                check_document(documents, selection.indices[i]);
            }
            break;
        case Selection::Kind::mask:
            if (selection.size != documents.count) {
                throw ArgumentError("select: mask has " + std::to_string(selection.size) + " entries for " +
                                    std::to_string(documents.count) + " documents");
            }
            for (std::int64_t i = 0; i < documents.count; ++i) {
                if (selection.mask[i]) check_document(documents, i);
            }
            break;
    }
}

// Document of result `position`; -1 where it is left out.
std::int64_t document_of(const Selection& selection, std::int64_t position) {
    switch (selection.kind) {
        case Selection::Kind::range: return selection.start + position;
        case Selection::Kind::indices: return selection.indices[position];
        case Selection::Kind::mask: return selection.mask[position] ? position : -1;
    }
    return -1;
}

// What all threads of one call share.
struct Call {
    const PreparedQueries& queries;
    const Documents& documents;
    const Selection& selection;
    const Options& options;
    const Engine& engine;
    float* scores;
    std::int32_t* best_at;
    std::vector<std::int64_t> chunks;  // bounds of result positions, each about kTickProducts of work

    std::atomic<std::size_t> next{0};
    std::atomic<bool> stop{false};
    std::atomic<std::int64_t> not_finite{std::numeric_limits<std::int64_t>::max()};  // document

    bool stopped() const {
        return stop.load(std::memory_order_relaxed) ||
               (options.cancel && options.cancel->load(std::memory_order_relaxed));
    }
};

// One thread's scratch and its way through the chunks.
class Worker {
   public:
    Worker(Call& call, bool calls_back)
        : call_(call),
          calls_back_(calls_back && call.options.checkpoint),
          code_bytes_(code_bytes(call.documents.codec, call.documents.dim)),
          row_bytes_(call.documents.dim * pack_bytes(call.engine.pack)),
          piece_tokens_(std::max<std::int64_t>(16, static_cast<std::int64_t>(kPieceBytes / row_bytes_))),
          columns_(call.queries.panel.groups * kGroup),
          best_(columns_ * sizeof(std::int32_t)),
          at_(call.best_at ? columns_ * sizeof(std::int32_t) : 0),
          rows_(call.engine.stage ? static_cast<std::size_t>(piece_tokens_) * row_bytes_ : 0) {}

    void run() {
        if (call_.engine.enter) call_.engine.enter(row_bytes_);
        try {
            loop();
        } catch (...) {
            if (call_.engine.leave) call_.engine.leave();
            throw;
        }
        if (call_.engine.leave) call_.engine.leave();
    }

   private:
    void loop() {
        if (calls_back_) call_back();
        last_ = Clock::now();
        for (;;) {
            const std::size_t chunk = call_.next.fetch_add(1, std::memory_order_relaxed);
            if (chunk + 1 >= call_.chunks.size()) return;
            for (std::int64_t i = call_.chunks[chunk]; i < call_.chunks[chunk + 1]; ++i) {
                score(i);
                if (call_.stopped()) return;
            }
        }
    }

    void tick(std::int64_t tokens) {
        done_ += tokens * static_cast<std::int64_t>(columns_ * call_.documents.dim);
        if (done_ < kTickProducts) return;
        done_ = 0;
        if (!calls_back_) return;
        const auto now = Clock::now();
        if (now - last_ < kCheckpointEvery) return;
        call_back();
        last_ = Clock::now();
    }

    // What is called may use this thread's tiles itself.
    void call_back() {
        if (call_.engine.leave) call_.engine.leave();
        call_.options.checkpoint();
        if (call_.engine.enter) call_.engine.enter(row_bytes_);
    }

    void score(std::int64_t position) {
        const std::int64_t document = document_of(call_.selection, position);
        const std::int64_t results = call_.selection.results();
        const PreparedQueries& queries = call_.queries;
        const std::int64_t begin = document < 0 ? 0 : call_.documents.offsets[document];
        const std::int64_t end = document < 0 ? 0 : call_.documents.offsets[document + 1];
        if (begin == end) {
            for (std::size_t q = 0; q < queries.count(); ++q) {
                call_.scores[q * results + position] = -std::numeric_limits<float>::infinity();
            }
            if (call_.best_at) {
                const std::size_t real = queries.columns();
                std::fill_n(call_.best_at + position * real, real, -1);
            }
            return;
        }
        if (call_.engine.integer && !queries.scaled) {
            std::fill_n(best_.as<std::int32_t>(), columns_, std::numeric_limits<std::int32_t>::min());
        } else {
            std::fill_n(best_.as<float>(), columns_, -std::numeric_limits<float>::infinity());
        }
        if (call_.best_at) std::fill_n(at_.as<std::int32_t>(), columns_, 0);
        for (std::int64_t token = begin; token < end; token += piece_tokens_) {
            if (token != begin && call_.stopped()) return;
            scan(document, begin, token, std::min(piece_tokens_, end - token));
        }
        finish(document, position, results);
    }

    void scan(std::int64_t document, std::int64_t begin, std::int64_t token, std::int64_t tokens) {
        const Documents& documents = call_.documents;
        const Engine& engine = call_.engine;
        const std::uint8_t* codes = documents.codes + static_cast<std::size_t>(token) * code_bytes_;
        Piece piece;
        piece.tokens = tokens;
        piece.first = static_cast<std::int32_t>(token - begin);
        piece.scales = documents.scales ? documents.scales + token : nullptr;
        float largest = 0.0f;
        if (engine.stage) {
            largest = engine.stage(codes, tokens, documents.dim, rows_.as<std::uint8_t>());
            piece.rows = rows_.as<std::uint8_t>();
            piece.after = piece_tokens_ - tokens;
        } else {
            if (engine.largest) largest = engine.largest(codes, tokens, documents.dim);
            piece.rows = codes;
            piece.before = token;
            piece.after = documents.tokens - token - tokens;
        }
        if (!(largest <= call_.queries.largest)) report(document);  // NaN too
        std::int32_t* at = call_.best_at ? at_.as<std::int32_t>() : nullptr;
        const Panel& panel = call_.queries.panel;
        if (!engine.integer) {
            engine.floating(panel, piece, best_.as<float>(), at);
        } else if (call_.queries.scaled) {
            engine.scaled(panel, piece, best_.as<float>(), at);
        } else {
            engine.integer(panel, piece, best_.as<std::int32_t>(), at);
        }
        tick(tokens);
    }

    // The first document that has no finite score, whichever thread finds it when.
    void report(std::int64_t document) {
        std::int64_t known = call_.not_finite.load();
        while (document < known && !call_.not_finite.compare_exchange_weak(known, document)) {
        }
    }

    // From maxima to scores. Sums run over the query's tokens in their order, in int64 or binary64, so that a
    // score depends on nothing but the query and the document.
    void finish(std::int64_t document, std::int64_t position, std::int64_t results) {
        const PreparedQueries& queries = call_.queries;
        for (std::size_t q = 0; q < queries.count(); ++q) {
            const std::size_t first = queries.starts[q], stop = queries.starts[q + 1];
            double score = 0.0;
            if (call_.engine.integer && !queries.scaled) {
                const std::int32_t* best = best_.as<std::int32_t>();
                std::int64_t sum = 0;
                for (std::size_t c = first; c < stop; ++c) sum += best[c];
                sum = sum * (1 << call_.engine.shift) - queries.zero_sums[q];
                score = static_cast<double>(sum) * queries.factors[q];
            } else {
                const float* best = best_.as<float>();
                for (std::size_t c = first; c < stop; ++c) score += best[c];
                score *= queries.factors[q];
            }
            if (call_.options.mean) score /= static_cast<double>(stop - first);
            const auto rounded = static_cast<float>(score);
            if (!std::isfinite(rounded)) report(document);
            call_.scores[q * results + position] = rounded;
        }
        if (call_.best_at) {
            const std::size_t real = queries.columns();
            std::memcpy(call_.best_at + position * real, at_.as<std::int32_t>(), real * sizeof(std::int32_t));
        }
    }

    Call& call_;
    const bool calls_back_;
    const std::size_t code_bytes_, row_bytes_;
    const std::int64_t piece_tokens_;
    const std::size_t columns_;
    Aligned best_, at_, rows_;
    std::int64_t done_ = 0;
    Clock::time_point last_;
};

// Cuts the results into chunks of about kTickProducts; returns all products of two elements.
std::int64_t cut(Call& call) {
    const std::int64_t per_token =
        static_cast<std::int64_t>(call.queries.panel.groups * kGroup * call.documents.dim);
    const std::int64_t results = call.selection.results();
    std::int64_t all = 0, filled = 0;
    call.chunks.push_back(0);
    for (std::int64_t i = 0; i < results; ++i) {
        const std::int64_t document = document_of(call.selection, i);
        if (document >= 0) {
            const std::int64_t tokens = call.documents.offsets[document + 1] - call.documents.offsets[document];
            // What a document costs beside its tokens is about what four tokens cost.
            filled += (tokens + 4) * per_token;
        }
        if (filled >= kTickProducts) {
            all += filled;
            filled = 0;
            call.chunks.push_back(i + 1);
        }
    }
    if (call.chunks.back() != results) call.chunks.push_back(results);
    return all + filled;
}

}  // namespace

void maxsim(const PreparedQueries& queries, const Documents& documents, const Selection& selection,
            const Options& options, float* scores, std::int32_t* best) {
    check(queries, documents, selection);
    if (options.threads < 1) throw ArgumentError("threads: must be at least 1");
    if (selection.results() == 0) return;
    Call call{queries, documents, selection, options, engine(documents.codec, queries.level), scores, best, {}};
    const std::int64_t products = cut(call);
    const std::int64_t useful = std::min<std::int64_t>(products / kThreadProducts + 1,
                                                       static_cast<std::int64_t>(call.chunks.size()) - 1);
    const auto threads = static_cast<std::size_t>(std::clamp<std::int64_t>(useful, 1, options.threads));

    std::exception_ptr failure;
    std::mutex failing;
    const auto work = [&](bool calls_back) {
        try {
            Worker(call, calls_back).run();
        } catch (...) {
            call.stop = true;
            const std::lock_guard<std::mutex> hold(failing);
            if (!failure) failure = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    others.reserve(threads - 1);
    for (std::size_t i = 1; i < threads; ++i) {
        try {
            others.emplace_back(work, false);
        } catch (const std::system_error&) {
            break;  // the system gives no more threads: those that there are do the work
        }
    }
    work(true);
    for (std::thread& other : others) other.join();
    if (failure) std::rethrow_exception(failure);
    if (options.cancel && options.cancel->load(std::memory_order_relaxed)) throw Cancelled();
    if (call.not_finite != std::numeric_limits<std::int64_t>::max()) {
        throw ArgumentError("codes: document " + std::to_string(call.not_finite.load()) +
                            " has no finite score: its tokens aren't finite, or values are so large that float32 overflows");
    }
}

std::vector<std::int64_t> topk(const float* scores, std::int64_t n, std::int64_t k) {
    if (k < 1) throw ArgumentError("k: must be at least 1");
    std::vector<std::int64_t> positions;
    for (std::int64_t i = 0; i < n; ++i) {
        if (scores[i] > -std::numeric_limits<float>::infinity()) positions.push_back(i);
    }
    const auto before = [scores](std::int64_t a, std::int64_t b) {
        return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
    };
    if (static_cast<std::int64_t>(positions.size()) > k) {
        std::nth_element(positions.begin(), positions.begin() + k, positions.end(), before);
        positions.resize(static_cast<std::size_t>(k));
    }
    std::sort(positions.begin(), positions.end(), before);
    return positions;
}

}  // namespace phasemesh::kernels
