// MaxSim over packed ragged documents: validation, selection, threads, cancellation, and what becomes of the
// maxima that the kernels find. The kernels themselves stand behind micro.hpp.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "types.hpp"

namespace phasemesh::kernels {

// Packed documents. Nothing is copied; the arrays outlive the call.
struct Documents {
    const std::uint8_t* codes = nullptr;  // [tokens, code_bytes(codec, dim)], any alignment
    std::int64_t tokens = 0;
    std::size_t dim = 0;
    Codec codec = Codec::int8;
    std::uint64_t seed = 0;                 // of the rotation, for integer codecs
    const float* scales = nullptr;          // [tokens] or null; integer codecs only
    const std::int64_t* offsets = nullptr;  // [count + 1]: document i owns tokens offsets[i]..offsets[i + 1]
    std::int64_t count = 0;
};

// Which documents to score.
struct Selection {
    enum class Kind : std::uint8_t { range, indices, mask } kind = Kind::range;
    std::int64_t start = 0, stop = 0;         // range: documents start..stop
    const std::int64_t* indices = nullptr;    // indices: documents, any order, repeats allowed
    std::int64_t size = 0;                    // of indices or mask
    const std::uint8_t* mask = nullptr;       // mask: one byte per document, 0 leaves it out; size = count
    // Number of results: stop - start, size, or the number of documents (those left out score -inf).
    std::int64_t results() const { return kind == Kind::range ? stop - start : size; }
};

// One query, float32 [tokens, dim], row-major.
struct Query {
    const float* data = nullptr;
    std::size_t tokens = 0;
};

struct Options {
    bool mean = false;
    int threads = 1;  // at least 1
    Isa isa = Isa::amx;  // upper limit; see `resolve`
    const std::atomic<bool>* cancel = nullptr;  // set by another thread: Cancelled is thrown soon after
    // Called by the calling thread before the first block and then every few milliseconds; what it throws ends
    // the work and is rethrown.
    std::function<void()> checkpoint;
};

// Queries made ready for one codec, dimension, seed and instruction set: rotated, quantised, packed. May be
// scanned with from many threads at once.
class PreparedQueries;
std::shared_ptr<const PreparedQueries> prepare(const std::vector<Query>& queries, std::size_t dim, Codec codec,
                                               std::uint64_t seed, bool scaled, Isa isa);

// How far each of a query's tokens is from what is scanned with: |q - q'| in Euclidean norm, rounded up, so that a
// dot product with x is off by at most that times |x|. 0 for f16 and f32. [query.tokens]
std::vector<float> query_errors(const Query& query, std::size_t dim, Codec codec, std::uint64_t seed);

// scores: float32 [queries, selection.results()], query-major. -inf for empty documents and those left out.
// best: null, or int32 [selection.results(), total query tokens]: for every query token (of all queries, one
//   after the other) the position within the document of its best token, the first of equals; -1 where the
//   document is empty or left out.
// Throws ArgumentError, Cancelled, or what the checkpoint threw.
void maxsim(const PreparedQueries& queries, const Documents& documents, const Selection& selection,
            const Options& options, float* scores, std::int32_t* best);

// The k best of float32 scores [n]: positions by score descending, then position ascending; -inf is never among
// them. Returns min(k, scores above -inf) positions.
std::vector<std::int64_t> topk(const float* scores, std::int64_t n, std::int64_t k);

// Reads `bytes` bytes with wide loads from `threads` threads, nothing else, `repeats` times; the yardstick of
// scans. Returns seconds of the fastest repeat; `sum` defeats the optimiser.
double stream_read(const void* data, std::size_t bytes, int threads, int repeats, Isa isa, std::uint64_t* sum);

}  // namespace phasemesh::kernels
