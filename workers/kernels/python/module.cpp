// The core for Python: views of numpy arrays in, numpy arrays out, the GIL released around the work.
//
// What comes in has been looked at by the Python face, which words the errors; here everything that the core takes
// as a bare pointer is held against the sizes it has to have, so that no call can read beyond an array. Codes are
// never copied.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "codec.hpp"
#include "cpu.hpp"
#include "exact.hpp"
#include "peak.hpp"
#include "scan.hpp"

namespace nb = nanobind;
namespace pk = phasemesh::kernels;

namespace {

template <class T, int N>
using View = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, int N>
using Owned = nb::ndarray<nb::numpy, T, nb::ndim<N>, nb::c_contig>;

// Python's `bool(token.cancelled)` and the scan look at the same flag.
struct CancelToken {
    std::atomic<bool> flag{false};
};

template <class T>
std::unique_ptr<T[]> allocate(std::size_t size) {
    return std::unique_ptr<T[]>(new T[size]);
}

template <class T, int N>
Owned<T, N> hand_over(std::unique_ptr<T[]> data, const std::size_t (&shape)[N]) {
    nb::capsule owner(data.get(), [](void* p) noexcept { delete[] static_cast<T*>(p); });
    T* const pointer = data.release();
    return Owned<T, N>(pointer, N, shape, owner);
}

pk::Codec codec_of(const std::string& name) {
    if (name == "int8") return pk::Codec::int8;
    if (name == "int4") return pk::Codec::int4;
    if (name == "bf16") return pk::Codec::bf16;
    if (name == "f16") return pk::Codec::f16;
    if (name == "f32") return pk::Codec::f32;
    throw pk::ArgumentError("codec: \"" + name + "\" is none of int8, int4, bf16, f16, f32");
}

void check_dim(const char* argument, std::size_t dim) {
    if (dim == 0 || dim % pk::kDimStep != 0 || dim > pk::kMaxDim) {
        throw pk::ArgumentError(std::string(argument) + ": vectors have " + std::to_string(dim) +
                                " elements; a multiple of " + std::to_string(pk::kDimStep) + " up to " +
                                std::to_string(pk::kMaxDim) + " is needed");
    }
}

// Dimension of the vectors that rows of these codes stand for.
std::size_t check_codes(const View<std::uint8_t, 2>& codes, pk::Codec codec) {
    const std::size_t bytes = codes.shape(1);
    const std::size_t dim = codec == pk::Codec::int4 ? 2 * bytes : bytes / pk::code_bytes(codec, 1);
    check_dim("codes", dim);
    if (pk::code_bytes(codec, dim) != bytes) throw pk::ArgumentError("codes: rows aren't whole vectors");
    return dim;
}

const float* check_scales(const std::optional<View<float, 1>>& scales, std::size_t tokens, pk::Codec codec) {
    if (!scales) return nullptr;
    if (!pk::is_integer(codec)) throw pk::ArgumentError("scales: only int8 and int4 codes have scales");
    if (scales->shape(0) != tokens) {
        throw pk::ArgumentError("scales: there are " + std::to_string(scales->shape(0)) + " for " +
                                std::to_string(tokens) + " tokens");
    }
    return scales->data();
}

std::size_t check_offsets(const View<std::int64_t, 1>& offsets) {
    if (offsets.shape(0) == 0) throw pk::ArgumentError("offsets: empty; n documents have n + 1 offsets");
    return offsets.shape(0) - 1;
}

pk::FloatType float_type(const nb::dlpack::dtype& dtype) {
    if (dtype == nb::dtype<float>()) return pk::FloatType::f32;
    if (dtype == nb::dtype<double>()) return pk::FloatType::f64;
    if (dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float) && dtype.bits == 16 &&
        dtype.lanes == 1) {
        return pk::FloatType::f16;
    }
    throw pk::ArgumentError("tokens: float16, float32 or float64 is needed");
}

using Refusals = std::vector<std::tuple<std::int64_t, std::int64_t, std::string>>;

nb::tuple encode(const nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>& tokens,
                 const std::string& codec_name, std::uint64_t seed,
                 const std::optional<View<std::int64_t, 1>>& offsets, std::optional<bool> keep_scales,
                 bool want_errors, int threads, const std::string& isa_name) {
    const pk::Codec codec = codec_of(codec_name);
    const pk::Isa isa = pk::parse(isa_name);
    const pk::FloatType type = float_type(tokens.dtype());
    const std::size_t count = tokens.shape(0), dim = tokens.shape(1);
    check_dim("tokens", dim);
    const std::size_t documents = offsets ? check_offsets(*offsets) : count;
    const std::int64_t* const starts = offsets ? offsets->data() : nullptr;
    if (keep_scales.value_or(false) && !pk::is_integer(codec)) {
        throw pk::ArgumentError("scales: only int8 and int4 codes have scales");
    }
    const void* const data = tokens.data();
    const std::size_t bytes = pk::code_bytes(codec, dim);
    auto codes = allocate<std::uint8_t>(count * bytes);
    std::unique_ptr<float[]> scales, errors;
    pk::EncodeResult result;
    {
        nb::gil_scoped_release release;
        const bool keep = pk::is_integer(codec) &&
                          (keep_scales ? *keep_scales : !pk::all_unit(data, type, count, dim, threads, isa));
        if (keep) scales = allocate<float>(count);
        if (want_errors) errors = allocate<float>(count);
        result = pk::encode(data, type, count, dim, codec, seed, starts, documents, threads, isa, codes.get(),
                            scales.get(), errors.get());
    }
    Refusals refused;
    refused.reserve(result.refused.size());
    for (const pk::Refused& one : result.refused) {
        refused.emplace_back(one.document, one.token,
                             one.flaw == pk::Flaw::not_finite ? "not_finite" : "zero_norm");
    }
    nb::object scales_out = nb::none(), errors_out = nb::none();
    if (scales) scales_out = nb::cast(hand_over<float, 1>(std::move(scales), {count}));
    if (errors) errors_out = nb::cast(hand_over<float, 1>(std::move(errors), {count}));
    return nb::make_tuple(hand_over<std::uint8_t, 2>(std::move(codes), {count, bytes}), scales_out, errors_out,
                          refused);
}

Owned<float, 2> decode(const View<std::uint8_t, 2>& codes, const std::string& codec_name, std::uint64_t seed,
                       const std::optional<View<float, 1>>& scales, int threads) {
    const pk::Codec codec = codec_of(codec_name);
    const std::size_t count = codes.shape(0), dim = check_codes(codes, codec);
    const float* const factors = check_scales(scales, count, codec);
    auto out = allocate<float>(count * dim);
    {
        nb::gil_scoped_release release;
        pk::decode(codes.data(), count, dim, codec, seed, factors, threads, out.get());
    }
    return hand_over<float, 2>(std::move(out), {count, dim});
}

// selection: one of (start, stop), document numbers, or a mask.
nb::tuple maxsim(const std::vector<View<float, 2>>& queries, const View<std::uint8_t, 2>& codes,
                 const View<std::int64_t, 1>& offsets, const std::string& codec_name, std::uint64_t seed,
                 const std::optional<View<float, 1>>& scales,
                 const std::optional<std::tuple<std::int64_t, std::int64_t>>& range,
                 const std::optional<View<std::int64_t, 1>>& indices,
                 const std::optional<View<std::uint8_t, 1>>& mask, bool mean, bool argmax, int threads,
                 const CancelToken* cancel, const nb::object& checkpoint, const std::string& isa_name) {
    pk::Documents documents;
    documents.codec = codec_of(codec_name);
    documents.dim = check_codes(codes, documents.codec);
    documents.codes = codes.data();
    documents.tokens = static_cast<std::int64_t>(codes.shape(0));
    documents.seed = seed;
    documents.scales = check_scales(scales, codes.shape(0), documents.codec);
    documents.count = static_cast<std::int64_t>(check_offsets(offsets));
    documents.offsets = offsets.data();

    pk::Selection selection;
    selection.stop = documents.count;
    if (range) {
        std::tie(selection.start, selection.stop) = *range;
        if (selection.start < 0 || selection.stop < selection.start || selection.stop > documents.count) {
            throw pk::ArgumentError("select: " + std::to_string(selection.start) + ":" +
                                    std::to_string(selection.stop) + " leaves the " +
                                    std::to_string(documents.count) + " documents");
        }
    } else if (indices) {
        selection.kind = pk::Selection::Kind::indices;
        selection.indices = indices->data();
        selection.size = static_cast<std::int64_t>(indices->shape(0));
    } else if (mask) {
        if (mask->shape(0) != static_cast<std::size_t>(documents.count)) {
            throw pk::ArgumentError("select: a mask of " + std::to_string(mask->shape(0)) + " for " +
                                    std::to_string(documents.count) + " documents");
        }
        selection.kind = pk::Selection::Kind::mask;
        selection.mask = mask->data();
        selection.size = documents.count;
    }

    std::vector<pk::Query> rows;
    std::size_t columns = 0;
    for (const auto& query : queries) {
        if (query.shape(1) != documents.dim) {
            const std::string name =
                queries.size() == 1 ? "query" : "queries[" + std::to_string(rows.size()) + "]";
            throw pk::ArgumentError(name + ": vectors have " + std::to_string(query.shape(1)) +
                                    " elements, those of the documents " + std::to_string(documents.dim));
        }
        rows.push_back({query.data(), query.shape(0)});
        columns += query.shape(0);
    }

    pk::Options options;
    options.mean = mean;
    options.threads = threads;
    options.isa = pk::parse(isa_name);
    options.cancel = cancel ? &cancel->flag : nullptr;
    if (!checkpoint.is_none()) {
        // By its address: a copy of this function must not touch a reference count without the GIL.
        options.checkpoint = [call = checkpoint.ptr()] {
            nb::gil_scoped_acquire acquire;
            const nb::handle function(call);
            function();
        };
    }

    const auto results = static_cast<std::size_t>(selection.results());
    auto scores = allocate<float>(rows.size() * results);
    std::unique_ptr<std::int32_t[]> best;
    if (argmax) best = allocate<std::int32_t>(results * columns);
    {
        nb::gil_scoped_release release;
        const auto prepared =
            pk::prepare(rows, documents.dim, documents.codec, seed, documents.scales != nullptr, options.isa);
        pk::maxsim(*prepared, documents, selection, options, scores.get(), best.get());
    }
    nb::object best_out = nb::none();
    if (best) best_out = nb::cast(hand_over<std::int32_t, 2>(std::move(best), {results, columns}));
    return nb::make_tuple(hand_over<float, 2>(std::move(scores), {rows.size(), results}), best_out);
}

Owned<double, 1> exact_maxsim(const View<float, 2>& query, const View<std::uint8_t, 2>& tokens,
                              const View<std::int64_t, 1>& offsets, const View<std::int64_t, 1>& indices,
                              const View<float, 2>& scan_query, const View<std::uint8_t, 2>& codes,
                              const std::string& codec_name, std::uint64_t seed,
                              const std::optional<View<float, 1>>& scales, const View<double, 2>& spread,
                              const View<double, 2>& reach, bool mean, const CancelToken* cancel,
                              const nb::object& checkpoint, const std::string& isa_name) {
    pk::Documents vectors;
    vectors.codec = pk::Codec::f16;
    vectors.dim = check_codes(tokens, vectors.codec);
    vectors.codes = tokens.data();
    vectors.tokens = static_cast<std::int64_t>(tokens.shape(0));
    vectors.count = static_cast<std::int64_t>(check_offsets(offsets));
    vectors.offsets = offsets.data();
    pk::Documents scanned = vectors;
    scanned.codec = codec_of(codec_name);
    scanned.dim = check_codes(codes, scanned.codec);
    scanned.codes = codes.data();
    scanned.tokens = static_cast<std::int64_t>(codes.shape(0));
    scanned.seed = seed;
    scanned.scales = check_scales(scales, codes.shape(0), scanned.codec);

    const std::size_t columns = query.shape(0), results = indices.shape(0);
    if (query.shape(1) != vectors.dim || scan_query.shape(1) != vectors.dim || scan_query.shape(0) != columns) {
        throw pk::ArgumentError("query: has shape [" + std::to_string(columns) + ", " +
                                std::to_string(query.shape(1)) + "], the vectors have " +
                                std::to_string(vectors.dim) + " elements, or scan_query has another shape");
    }
    if (spread.shape(0) != 2 || spread.shape(1) != columns) throw pk::ArgumentError("spread: [2, q] is needed");
    if (reach.shape(0) != 2 || reach.shape(1) != results) throw pk::ArgumentError("reach: [2, m] is needed");

    pk::Selection selection;
    selection.kind = pk::Selection::Kind::indices;
    selection.indices = indices.data();
    selection.size = static_cast<std::int64_t>(results);
    pk::Options options;
    options.mean = mean;
    options.isa = pk::parse(isa_name);
    options.cancel = cancel ? &cancel->flag : nullptr;
    if (!checkpoint.is_none()) {
        // By its address: a copy of this function must not touch a reference count without the GIL.
        options.checkpoint = [call = checkpoint.ptr()] {
            nb::gil_scoped_acquire acquire;
            const nb::handle function(call);
            function();
        };
    }
    auto scores = allocate<double>(results);
    {
        nb::gil_scoped_release release;
        const auto prepared = pk::prepare({{scan_query.data(), columns}}, vectors.dim, scanned.codec, seed,
                                          scanned.scales != nullptr, pk::exact_level(options.isa));
        pk::exact_maxsim({query.data(), columns}, vectors, *prepared, scanned, {spread.data(), reach.data()},
                         selection, options, scores.get());
    }
    return hand_over<double, 1>(std::move(scores), {results});
}

Owned<std::int64_t, 1> topk(const View<float, 1>& scores, std::int64_t k) {
    std::vector<std::int64_t> positions;
    {
        nb::gil_scoped_release release;
        positions = pk::topk(scores.data(), static_cast<std::int64_t>(scores.shape(0)), k);
    }
    auto out = allocate<std::int64_t>(positions.size());
    std::copy(positions.begin(), positions.end(), out.get());
    return hand_over<std::int64_t, 1>(std::move(out), {positions.size()});
}

Owned<float, 1> query_errors(const View<float, 2>& query, const std::string& codec_name, std::uint64_t seed) {
    const pk::Codec codec = codec_of(codec_name);
    check_dim("query", query.shape(1));
    std::vector<float> errors;
    {
        nb::gil_scoped_release release;
        errors = pk::query_errors({query.data(), query.shape(0)}, query.shape(1), codec, seed);
    }
    auto out = allocate<float>(errors.size());
    std::copy(errors.begin(), errors.end(), out.get());
    return hand_over<float, 1>(std::move(out), {errors.size()});
}

double stream_read(const View<std::uint8_t, 1>& bytes, int threads, int repeats, const std::string& isa_name) {
    const pk::Isa isa = pk::parse(isa_name);
    std::uint64_t sum = 0;
    nb::gil_scoped_release release;
    return pk::stream_read(bytes.data(), bytes.shape(0), threads, repeats, isa, &sum);
}

double multiply_rate(int threads, int repeats, const std::string& isa_name) {
    const pk::Isa isa = pk::parse(isa_name);
    nb::gil_scoped_release release;
    return pk::multiply_rate(threads, repeats, isa);
}

std::vector<std::string> levels() {
    std::vector<std::string> names;
    for (const pk::Isa isa : pk::available()) names.emplace_back(pk::name(isa));
    return names;
}

nb::dict features() {
    const pk::Features& f = pk::features();
    nb::dict found;
    found["avx2"] = f.avx2;
    found["fma"] = f.fma;
    found["f16c"] = f.f16c;
    found["avxvnni"] = f.avxvnni;
    found["avx512"] = f.avx512;
    found["avx512_bf16"] = f.avx512_bf16;
    found["amx_int8"] = f.amx_int8;
    found["amx_bf16"] = f.amx_bf16;
    found["neon"] = f.neon;
    found["dotprod"] = f.dotprod;
    return found;
}

}  // namespace

NB_MODULE(_core, m) {
    using namespace nb::literals;

    m.attr("version") = PHASEMESH_KERNELS_VERSION;

    // ArgumentError is a std::invalid_argument, which is Python's ValueError.
    nb::exception<pk::Cancelled>(m, "Cancelled", PyExc_RuntimeError);

    nb::class_<CancelToken>(m, "CancelToken", "Ends work from another thread: give it as `cancel`, call `cancel()`.")
        .def(nb::init<>())
        .def(
            "cancel", [](CancelToken& self) { self.flag.store(true); },
            "End the work that was given this token, within milliseconds, and all that will be.")
        .def_prop_ro(
            "cancelled", [](const CancelToken& self) { return self.flag.load(); }, "Whether `cancel` was called.");

    m.def("encode", &encode, "tokens"_a.noconvert(), "codec"_a, "seed"_a, "offsets"_a.noconvert().none(),
          "scales"_a.none(), "errors"_a, "threads"_a, "isa"_a);
    m.def("decode", &decode, "codes"_a.noconvert(), "codec"_a, "seed"_a, "scales"_a.noconvert().none(),
          "threads"_a);
    m.def("maxsim", &maxsim, "queries"_a.noconvert(), "codes"_a.noconvert(), "offsets"_a.noconvert(), "codec"_a,
          "seed"_a, "scales"_a.noconvert().none(), "range"_a.none(), "indices"_a.noconvert().none(),
          "mask"_a.noconvert().none(), "mean"_a, "argmax"_a, "threads"_a, "cancel"_a.none(), "checkpoint"_a.none(),
          "isa"_a);
    m.def("exact_maxsim", &exact_maxsim, "query"_a.noconvert(), "tokens"_a.noconvert(), "offsets"_a.noconvert(),
          "indices"_a.noconvert(), "scan_query"_a.noconvert(), "codes"_a.noconvert(), "codec"_a, "seed"_a,
          "scales"_a.noconvert().none(), "spread"_a.noconvert(), "reach"_a.noconvert(), "mean"_a,
          "cancel"_a.none(), "checkpoint"_a.none(), "isa"_a);
    m.def("topk", &topk, "scores"_a.noconvert(), "k"_a);
    m.def("query_errors", &query_errors, "query"_a.noconvert(), "codec"_a, "seed"_a);
    m.def("stream_read", &stream_read, "data"_a.noconvert(), "threads"_a, "repeats"_a, "isa"_a);
    m.def("multiply_rate", &multiply_rate, "threads"_a, "repeats"_a, "isa"_a);
    m.def("levels", &levels);
    m.def("features", &features);
    m.def(
        "resolve", [](const std::string& isa) { return std::string(pk::name(pk::resolve(pk::parse(isa)))); },
        "isa"_a);
    m.def(
        "path",
        [](const std::string& codec, const std::string& level) {
            return std::string(pk::path(codec_of(codec), pk::parse(level)));
        },
        "codec"_a, "level"_a);
}
