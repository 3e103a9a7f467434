// Exact scores against a loop over every pair of vectors, bit for bit: at every level, whatever is scanned and
// however loose the bounds, in arrays that end where they say.
#include "brute.hpp"
#include "exact.hpp"

using namespace brute;

namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();
constexpr double kUnknown = std::numeric_limits<double>::infinity();

double added(const std::vector<double>& values) {
    double lanes[8] = {};
    for (std::size_t i = 0; i < values.size(); ++i) lanes[i % 8] += values[i];
    const double half[4] = {lanes[0] + lanes[4], lanes[1] + lanes[5], lanes[2] + lanes[6], lanes[3] + lanes[7]};
    return (half[0] + half[2]) + (half[1] + half[3]);
}

std::vector<double> truth(const Corpus& corpus, const Rows& query, bool mean) {
    std::vector<double> scores;
    std::vector<double> products(corpus.dim);
    for (std::int64_t d = 0; d < corpus.count(); ++d) {
        std::vector<double> best(query.tokens, kNothing);
        for (auto t = static_cast<std::size_t>(corpus.offsets[d]);
             t < static_cast<std::size_t>(corpus.offsets[d + 1]); ++t) {
            for (std::size_t q = 0; q < query.tokens; ++q) {
                for (std::size_t i = 0; i < corpus.dim; ++i) {
                    products[i] = element(corpus, t, i) * static_cast<double>(query.data[q * corpus.dim + i]);
                }
                best[q] = std::max(best[q], added(products));
            }
        }
        const double sum = corpus.offsets[d] == corpus.offsets[d + 1] ? kNothing : added(best);
        scores.push_back(mean ? sum / static_cast<double>(query.tokens) : sum);
    }
    return scores;
}

// Twice what Higham's bound allows of a float32 dot product, with the largest norms there are.
pk::Bounds loose(const Corpus& corpus, const Rows& query, std::vector<double>& spread, std::vector<double>& reach) {
    double longest = 0.0;
    for (std::size_t t = 0; t < corpus.codes.size() / corpus.row(); ++t) {
        double square = 0.0;
        for (std::size_t i = 0; i < corpus.dim; ++i) square += element(corpus, t, i) * element(corpus, t, i);
        longest = std::max(longest, std::sqrt(square));
    }
    spread.assign(2 * query.tokens, 0.0);
    for (std::size_t q = 0; q < query.tokens; ++q) {
        double square = 0.0;
        for (std::size_t i = 0; i < corpus.dim; ++i) {
            const double value = query.data[q * corpus.dim + i];
            square += value * value;
        }
        spread[q] = 2.0 * static_cast<double>(corpus.dim + 1) * 0x1p-24 * std::sqrt(square);
        spread[query.tokens + q] = 0x1p-90;
    }
    const auto count = static_cast<std::size_t>(corpus.count());
    reach.assign(2 * count, 1.0);
    std::fill_n(reach.begin(), count, longest);
    return {spread.data(), reach.data()};
}

bool same(const std::vector<double>& a, const std::vector<double>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), 8 * a.size()) == 0;
}

std::vector<double> run(const Corpus& corpus, const Rows& query, const pk::Documents& scanned,
                        const pk::Bounds& bounds, pk::Isa isa, bool mean, bool at_start) {
    const check::Fenced codes(corpus.codes, at_start), offsets(corpus.offsets, at_start);
    pk::Documents vectors = corpus.view();
    vectors.codes = codes.bytes();
    vectors.offsets = offsets.as<std::int64_t>();
    pk::Documents seen = scanned.codes == corpus.codes.data() ? vectors : scanned;
    pk::Selection selection;
    selection.stop = corpus.count();
    pk::Options options;
    options.mean = mean;
    const auto ready = pk::prepare({query.view()}, corpus.dim, seen.codec, seen.seed, seen.scales != nullptr,
                                   pk::exact_level(isa));
    std::vector<double> scores(static_cast<std::size_t>(corpus.count()), 12345.0);
    pk::exact_maxsim(query.view(), vectors, *ready, seen, bounds, selection, options, scores.data());
    return scores;
}

void test_bits() {
    check::Random random(11);
    for (const std::size_t dim : {16u, 48u, 128u, 4096u}) {
        for (const std::size_t tokens : {1u, 17u, 40u}) {
            if (dim == 4096 && tokens != 17) continue;
            const auto most = static_cast<std::int64_t>(dim == 4096 ? 9 : 300);
            std::vector<std::int64_t> lengths = {3, 0, 1, most, 16, 17, 0};
            const Corpus corpus = brute::corpus(random, pk::Codec::f16, dim, false, lengths);
            const Rows query = brute::query(random, tokens, dim);
            const std::size_t count = lengths.size();
            // Codes that have nothing to do with the vectors: with bounds that know nothing, they can't harm.
            const Corpus wrong = brute::corpus(random, pk::Codec::int8, dim, false, lengths);
            const Corpus scaled = brute::corpus(random, pk::Codec::int8, dim, true, lengths);
            const std::vector<double> unknown(2 * tokens, 1.0), infinite(2 * count, kUnknown);
            std::vector<double> spread, reach;
            const pk::Bounds bounds = loose(corpus, query, spread, reach);
            for (const bool mean : {false, true}) {
                const std::vector<double> expected = truth(corpus, query, mean);
                for (const pk::Isa isa : check::levels()) {
                    check::place = std::string(pk::name(isa)) + " d=" + std::to_string(dim) +
                                   " q=" + std::to_string(tokens);
                    CHECK(same(run(corpus, query, corpus.view(), bounds, isa, mean, mean), expected));
                    const pk::Bounds none{unknown.data(), infinite.data()};
                    CHECK(same(run(corpus, query, corpus.view(), none, isa, mean, !mean), expected));
                    CHECK(same(run(corpus, query, wrong.view(), none, isa, mean, mean), expected));
                    CHECK(same(run(corpus, query, scaled.view(), none, isa, mean, mean), expected));
                }
            }
        }
    }
}

// A query of zeros is a factor of zero, and 0 / 0 a bound that isn't a number.
void test_zeros() {
    check::Random random(12);
    const Corpus corpus = brute::corpus(random, pk::Codec::f16, 32, false, {5, 2});
    const Corpus codes = brute::corpus(random, pk::Codec::int8, 32, false, {5, 2});
    Rows query = brute::query(random, 3, 32);
    std::fill(query.data.begin(), query.data.end(), 0.0f);
    const std::vector<double> nothing(6, 0.0), here(4, 1.0);
    for (const pk::Isa isa : check::levels()) {
        for (const Corpus* scanned : {&corpus, &codes}) {
            const auto scores =
                run(corpus, query, scanned->view(), {nothing.data(), here.data()}, isa, false, false);
            CHECK(same(scores, {0.0, 0.0}));
        }
    }
}

void test_refusals() {
    check::Random random(13);
    Corpus corpus = brute::corpus(random, pk::Codec::f16, 32, false, {5, 2});
    const Rows query = brute::query(random, 3, 32);
    const std::vector<double> spread(6, 1.0), reach(4, 1.0);
    const pk::Bounds bounds{spread.data(), reach.data()};
    const Corpus narrow = brute::corpus(random, pk::Codec::int4, 32, false, {5, 2});
    CHECK_THROWS(run(corpus, query, narrow.view(), bounds, pk::Isa::amx, false, true), pk::ArgumentError, "codec:");
    const Corpus fewer = brute::corpus(random, pk::Codec::int8, 32, false, {5, 1});
    CHECK_THROWS(run(corpus, query, fewer.view(), bounds, pk::Isa::amx, false, true), pk::ArgumentError, "codes:");
    const std::uint16_t infinite = 0x7c00;
    std::memcpy(corpus.codes.data() + 2 * 32 * 6, &infinite, 2);
    CHECK_THROWS(run(corpus, query, corpus.view(), bounds, pk::Isa::amx, false, true), pk::ArgumentError,
                 "tokens: document 1");
    corpus.offsets[1] = 9;
    CHECK_THROWS(run(corpus, query, corpus.view(), bounds, pk::Isa::amx, false, true), pk::ArgumentError,
                 "offsets: document 0");
}

}  // namespace

int main() {
    test_bits();
    test_zeros();
    test_refusals();
    return check::finish("test_exact");
}
