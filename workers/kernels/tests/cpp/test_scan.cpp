// Scores and positions of every path, codec and shape against brute force: integer codecs bit for bit, float ones
// to a proven bound; and what selections, means and the best k make of them.
#include "brute.hpp"

using namespace brute;

namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Result {
    std::vector<float> scores;
    std::vector<std::int32_t> best;
};

pk::Selection all(const Corpus& corpus) {
    pk::Selection selection;
    selection.stop = corpus.count();
    return selection;
}

Result run(const Corpus& corpus, const std::vector<Rows>& queries, pk::Isa isa, bool argmax,
           const pk::Selection& selection, pk::Options options = {}) {
    std::vector<pk::Query> views;
    std::size_t columns = 0;
    for (const Rows& rows : queries) {
        views.push_back(rows.view());
        columns += rows.tokens;
    }
    const auto ready = pk::prepare(views, corpus.dim, corpus.codec, corpus.seed, !corpus.scales.empty(), isa);
    Result result;
    const auto n = static_cast<std::size_t>(selection.results());
    result.scores.assign(n * queries.size(), 12345.0f);
    if (argmax) result.best.assign(n * columns, 12345);
    pk::maxsim(*ready, corpus.view(), selection, options, result.scores.data(),
               argmax ? result.best.data() : nullptr);
    return result;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), 4 * a.size()) == 0;
}

// Whether position `at` is a first best one as far as floats can tell.
bool plausible(const Corpus& corpus, const Truth& truth, std::size_t tokens, std::int64_t d, std::size_t q,
               std::int32_t at) {
    const auto begin = static_cast<std::size_t>(corpus.offsets[d]);
    const auto end = static_cast<std::size_t>(corpus.offsets[d + 1]);
    if (begin == end) return at == -1;
    if (at < 0 || begin + static_cast<std::size_t>(at) >= end) return false;
    const std::size_t token = begin + static_cast<std::size_t>(at);
    const std::uint8_t* const codes = corpus.codes.data();
    for (std::size_t t = begin; t < token; ++t) {
        if (std::memcmp(codes + t * corpus.row(), codes + token * corpus.row(), corpus.row()) == 0) return false;
    }
    const double here = truth.dots[token * tokens + q] + truth.dot_bounds[token * tokens + q];
    for (std::size_t t = begin; t < end; ++t) {
        if (truth.dots[t * tokens + q] - truth.dot_bounds[t * tokens + q] > here) return false;
    }
    return true;
}

void compare(const Corpus& corpus, const std::vector<Rows>& queries, const std::vector<pk::Isa>& levels) {
    std::vector<Truth> truths;
    std::size_t columns = 0;
    for (const Rows& rows : queries) {
        truths.push_back(maxsim(corpus, rows));
        columns += rows.tokens;
    }
    const auto n = static_cast<std::size_t>(corpus.count());
    for (const pk::Isa isa : levels) {
        check::place = std::string(name(corpus.codec)) + (corpus.scales.empty() ? "" : " scaled") + " dim " +
                       std::to_string(corpus.dim) + " query " + std::to_string(queries[0].tokens) + " of " +
                       std::to_string(queries.size()) + " " + pk::name(isa);
        const Result found = run(corpus, queries, isa, true, all(corpus));
        CHECK(same(found.scores, run(corpus, queries, isa, false, all(corpus)).scores));
        pk::Options mean;
        mean.mean = true;
        const Result means = run(corpus, queries, isa, false, all(corpus), mean);
        std::size_t first = 0;
        for (std::size_t q = 0; q < queries.size(); ++q) {
            const Truth& truth = truths[q];
            for (std::size_t d = 0; d < n; ++d) {
                const float score = found.scores[q * n + d], average = means.scores[q * n + d];
                const double count = static_cast<double>(queries[q].tokens);
                if (std::isinf(truth.score[d])) {
                    CHECK(score == kNothing && average == kNothing);
                } else if (pk::is_integer(corpus.codec)) {
                    CHECK_THAT(score == static_cast<float>(truth.score[d]),
                               "document " + std::to_string(d) + ": " + std::to_string(score) + " is not " +
                                   std::to_string(truth.score[d]));
                    CHECK(average == static_cast<float>(truth.score[d] / count));
                } else {
                    CHECK_THAT(std::fabs(score - truth.score[d]) <= truth.bound[d],
                               "document " + std::to_string(d) + ": off by " +
                                   std::to_string(std::fabs(score - truth.score[d]) / truth.bound[d]) + " bounds");
                    CHECK(std::fabs(average - truth.score[d] / count) <= truth.bound[d] / count + 0x1p-149);
                }
                for (std::size_t t = 0; t < queries[q].tokens; ++t) {
                    const std::int32_t at = found.best[d * columns + first + t];
                    if (pk::is_integer(corpus.codec)) {
                        CHECK_THAT(at == truth.best[d * queries[q].tokens + t],
                                   "best " + std::to_string(at) + " of document " + std::to_string(d));
                    } else {
                        CHECK_THAT(plausible(corpus, truth, queries[q].tokens, static_cast<std::int64_t>(d), t, at),
                                   "best " + std::to_string(at) + " of document " + std::to_string(d));
                    }
                }
            }
            first += queries[q].tokens;
            // Scored alone, a query has the same bits.
            if (queries.size() > 1) {
                const Result alone = run(corpus, {queries[q]}, isa, false, all(corpus));
                CHECK(std::memcmp(alone.scores.data(), found.scores.data() + q * n, 4 * n) == 0);
            }
        }
    }
}

template <class Work>
void for_each_codec(Work work) {
    for (const pk::Codec codec : kCodecs) {
        work(codec, false);
        if (pk::is_integer(codec)) work(codec, true);
    }
}

void shapes(const std::vector<pk::Isa>& levels) {
    check::Random random(1);
    const std::vector<std::int64_t> many = {0, 1, 0, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 49, 0, 1};
    const std::vector<std::int64_t> few = {1, 0, 2, 5, 17, 35};
    const std::size_t lengths[][3] = {{1, 2, 15}, {16, 17, 31}, {32, 33, 64}};
    for (const std::size_t dim : {16, 48, 64, 80, 96, 112, 128, 272, 320, 768, 1024, 4096}) {
        for_each_codec([&](pk::Codec codec, bool scaled) {
            const Corpus made = corpus(random, codec, dim, scaled, dim < 272 ? many : few);
            for (const auto& three : lengths) {
                std::vector<Rows> queries;
                for (const std::size_t tokens : three) queries.push_back(query(random, tokens, dim));
                if (dim <= 128) {
                    compare(made, queries, levels);
                } else {
                    // One odd, one even number of groups of 16.
                    compare(made, {queries[random.below(3)]}, levels);
                }
            }
        });
    }
    for_each_codec([&](pk::Codec codec, bool scaled) {
        compare(corpus(random, codec, 48, scaled, {3, 20, 0, 1}), {query(random, 300, 48)}, levels);
        compare(corpus(random, codec, 32, scaled, {9, 1}), {query(random, 1024, 32)}, levels);
        // Longer than what is scanned at a time.
        compare(corpus(random, codec, 64, scaled, {1, 5000, 2}), {query(random, 5, 64)}, levels);
    });
}

// The largest sums there are: full-range codes, the largest dimension and number of query tokens.
void extremes(const std::vector<pk::Isa>& levels) {
    for (const std::uint8_t byte : {0, 255}) {
        for (const float sign : {1.0f, -1.0f}) {
            for_each_codec([&](pk::Codec codec, bool scaled) {
                if (!pk::is_integer(codec)) return;
                Corpus made;
                made.codec = codec;
                made.dim = 4096;
                made.offsets = {0, 1, 3};
                made.codes.assign(3 * made.row(), byte);
                if (scaled) made.scales = {1.0f, 2.0f, 0.5f};
                // The rotated query's elements are all 127: it is the inverse rotation of a constant.
                std::vector<float> ones(4096, sign), flat(4096);
                pk::Rotation(4096, made.seed).backward(ones.data(), 1, flat.data());
                const std::size_t tokens = byte == 0 && !scaled ? 4096 : 33;
                Rows wide{std::vector<float>(tokens * 4096), tokens};
                for (std::size_t t = 0; t < tokens; ++t) {
                    std::memcpy(wide.data.data() + t * 4096, flat.data(), 4096 * sizeof(float));
                }
                for (const pk::Isa isa : levels) {
                    check::place = std::string(name(codec)) + " extremes " + pk::name(isa);
                    const Result found = run(made, {wide}, isa, true, all(made));
                    const int v = codec == pk::Codec::int8 ? byte - 128 : byte ? 15 : -15;
                    const double unit = pk::step(codec, 4096);
                    for (int d = 0; d < 2; ++d) {
                        const double scale = !scaled ? 1.0 : d == 0 ? 1.0 : v * sign > 0 ? 2.0 : 0.5;
                        const double expected = 4096.0 * static_cast<double>(tokens) * sign * v * unit * scale;
                        const double got = found.scores[static_cast<std::size_t>(d)];
                        CHECK_THAT(std::fabs(got - expected) <= std::fabs(expected) * 1e-5,
                                   std::to_string(got) + " is not " + std::to_string(expected));
                        CHECK(found.best[(static_cast<std::size_t>(d) + 1) * tokens - 1] ==
                              (scaled && d == 1 && v * sign < 0 ? 1 : 0));
                    }
                }
            });
        }
    }
}

void negatives(const std::vector<pk::Isa>& levels) {
    check::Random random(2);
    for (const pk::Codec codec : {pk::Codec::f32, pk::Codec::f16, pk::Codec::bf16}) {
        Corpus made = corpus(random, codec, 64, false, {1, 3, 18, 40});
        const std::size_t bytes = made.row() / 64;
        for (std::size_t i = 0; i < made.codes.size(); i += bytes) made.codes[i + bytes - 1] &= 0x7f;
        Rows below = query(random, 19, 64);
        for (float& value : below.data) value = -std::fabs(value) - 0.01f;
        compare(made, {below}, levels);
        for (const float score : run(made, {below}, levels.back(), false, all(made)).scores) CHECK(score < 0.0f);
    }
}

void selections(const std::vector<pk::Isa>& levels) {
    check::Random random(3);
    for_each_codec([&](pk::Codec codec, bool scaled) {
        const Corpus made = corpus(random, codec, 80, scaled, {4, 0, 1, 17, 33, 2, 0, 50, 6});
        const std::vector<Rows> queries = {query(random, 18, 80), query(random, 3, 80)};
        const std::size_t columns = 21, n = 9;
        for (const pk::Isa isa : levels) {
            check::place = std::string(name(codec)) + " selections " + pk::name(isa);
            const Result whole = run(made, queries, isa, true, all(made));
            const auto expect = [&](const pk::Selection& selection, const std::vector<int>& documents) {
                const Result found = run(made, queries, isa, true, selection);
                CHECK(found.scores.size() == 2 * documents.size());
                for (std::size_t i = 0; i < documents.size(); ++i) {
                    const int d = documents[i];
                    for (std::size_t q = 0; q < 2; ++q) {
                        const float wanted = d < 0 ? kNothing : whole.scores[q * n + static_cast<std::size_t>(d)];
                        CHECK(std::memcmp(&found.scores[q * documents.size() + i], &wanted, 4) == 0);
                    }
                    for (std::size_t c = 0; c < columns; ++c) {
                        CHECK(found.best[i * columns + c] ==
                              (d < 0 ? -1 : whole.best[static_cast<std::size_t>(d) * columns + c]));
                    }
                }
            };
            pk::Selection range;
            range.start = 2;
            range.stop = 7;
            expect(range, {2, 3, 4, 5, 6});
            range.stop = 2;
            expect(range, {});
            pk::Selection some;
            some.kind = pk::Selection::Kind::indices;
            const std::vector<std::int64_t> numbers = {8, 8, 0, 7, 1, 3, 8, 7};
            some.indices = numbers.data();
            some.size = 8;
            expect(some, {8, 8, 0, 7, 1, 3, 8, 7});
            some.size = 0;
            expect(some, {});
            pk::Selection masked;
            masked.kind = pk::Selection::Kind::mask;
            const std::vector<std::uint8_t> mask = {1, 1, 0, 255, 0, 2, 0, 0, 1};
            masked.mask = mask.data();
            masked.size = 9;
            expect(masked, {0, 1, -1, 3, -1, 5, -1, -1, 8});
        }
    });
}

void not_finite(const std::vector<pk::Isa>& levels) {
    check::Random random(4);
    const auto break_token = [](Corpus& made, std::size_t token, std::size_t i, bool nan) {
        const std::uint32_t wide = nan ? 0xffc00001u : 0x7f800000u;
        const std::size_t bytes = made.row() / made.dim;
        std::uint8_t* const to = made.codes.data() + token * made.row() + i * bytes;
        const auto half = static_cast<std::uint16_t>(made.codec == pk::Codec::bf16 ? (nan ? 0x7fc1 : 0xff80)
                                                                                  : (nan ? 0xfe01 : 0x7c00));
        std::memcpy(to, bytes == 4 ? static_cast<const void*>(&wide) : &half, bytes);
    };
    for (const pk::Codec codec : {pk::Codec::f32, pk::Codec::f16, pk::Codec::bf16}) {
        for (const std::size_t dim : {16, 80, 272}) {
            for (int which = 0; which < 4; ++which) {
                // Documents 0: 40, 1: none, 2: 3, 3: 30. The third's last and the fourth's first token are broken.
                Corpus made = corpus(random, codec, dim, false, {40, 0, 3, 30});
                break_token(made, 42, which % 2 ? dim - 1 : 0, which < 2);
                break_token(made, 43, which % 2 ? 0 : dim - 1, which < 2);
                for (const pk::Isa isa : levels) {
                    check::place = std::string(name(codec)) + " not finite " + pk::name(isa);
                    // Also where an infinite token loses to a finite one in every similarity.
                    for (const float sign : {1.0f, -1.0f}) {
                        Rows rows = query(random, 17, dim);
                        for (float& value : rows.data) value = sign * (std::fabs(value) + 0.1f);
                        CHECK_THROWS(run(made, {rows}, isa, which % 2 == 0, all(made)), pk::ArgumentError,
                                     "codes: document 2 ");
                    }
                    pk::Selection range;
                    range.stop = 2;  // the broken ones are its neighbours
                    const Result found = run(made, {query(random, 17, dim)}, isa, false, range);
                    CHECK(std::isfinite(found.scores[0]));
                }
            }
        }
    }
    for (const pk::Codec codec : {pk::Codec::int8, pk::Codec::int4}) {
        for (const float bad : {std::numeric_limits<float>::quiet_NaN(), HUGE_VALF, -HUGE_VALF, -1.0f}) {
            for (const std::size_t token : {0, 20, 39}) {
                Corpus made = corpus(random, codec, 32, true, {40, 5});
                made.scales[token] = bad;
                for (const pk::Isa isa : levels) {
                    check::place = std::string(name(codec)) + " scale no length " + pk::name(isa);
                    for (const bool argmax : {false, true}) {
                        CHECK_THROWS(run(made, {query(random, 17, 32)}, isa, argmax, all(made)), pk::ArgumentError,
                                     "scales: token " + std::to_string(token) + " ");
                    }
                }
            }
        }
    }
}

void queries() {
    check::place = "queries";
    check::Random random(5);
    const Rows one = query(random, 3, 32);
    const auto ready = [&](std::vector<pk::Query> views, std::size_t dim = 32, bool scaled = false,
                           pk::Codec codec = pk::Codec::int8) {
        return pk::prepare(views, dim, codec, 0, scaled, pk::Isa::amx);
    };
    CHECK_THROWS(ready({}), pk::ArgumentError, "queries: ");
    CHECK_THROWS(ready({{one.data.data(), 0}}), pk::ArgumentError, "query: ");
    CHECK_THROWS(ready({one.view(), {one.data.data(), 4097}}), pk::ArgumentError, "queries[1]: ");
    CHECK_THROWS(ready({one.view()}, 24), pk::ArgumentError, "query: dimension 24 ");
    CHECK_THROWS(ready({one.view()}, 0), pk::ArgumentError, "query: dimension 0 ");
    CHECK_THROWS(ready({one.view()}, 4112), pk::ArgumentError, "query: dimension 4112 ");
    CHECK_THROWS(ready({one.view()}, 32, true, pk::Codec::f32), pk::ArgumentError, "scales: ");
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), HUGE_VALF, -HUGE_VALF}) {
        Rows broken = one;
        broken.data[2 * 32 + 31] = bad;
        for (const pk::Codec codec : kCodecs) {
            CHECK_THROWS(ready({broken.view()}, 32, false, codec), pk::ArgumentError, "query: token 2 ");
        }
    }
    // Any finite size: scores grow with the query, exactly where by powers of two.
    for (const pk::Codec codec : {pk::Codec::int8, pk::Codec::int4}) {
        const Corpus made = corpus(random, codec, 32, false, {3, 2});
        const auto base = run(made, {one}, pk::Isa::amx, false, all(made)).scores;
        for (const int power : {-120, -20, 20, 120}) {
            Rows moved = one;
            for (float& value : moved.data) value = std::ldexp(value, power);
            const auto scores = run(made, {moved}, pk::Isa::amx, false, all(made)).scores;
            for (std::size_t d = 0; d < 2; ++d) CHECK(scores[d] == std::ldexp(base[d], power));
        }
        Rows nothing = one;
        std::fill(nothing.data.begin(), nothing.data.end(), 0.0f);
        for (const float score : run(made, {nothing}, pk::Isa::amx, false, all(made)).scores) CHECK(score == 0.0f);
    }
}

// Scores are off what the decoded vectors give by no more than `query_errors` says.
void query_errors() {
    check::Random random(6);
    for (const pk::Codec codec : kCodecs) {
        for (const std::size_t dim : {16, 96, 1024}) {
            check::place = std::string(name(codec)) + " query errors " + std::to_string(dim);
            Corpus made = corpus(random, codec, dim, false, std::vector<std::int64_t>(30, 1));
            std::vector<float> vectors(30 * dim);
            pk::decode(made.codes.data(), 30, dim, codec, made.seed, nullptr, 1, vectors.data());
            Rows rows = query(random, 20, dim);
            for (std::size_t i = 0; i < dim; ++i) rows.data[i] *= 1e-3f;  // one short token
            Rows alone{std::vector<float>(rows.data.begin(), rows.data.begin() + static_cast<std::ptrdiff_t>(dim)), 1};
            for (const Rows& one : {rows, alone}) {
                const auto errors = pk::query_errors(one.view(), dim, codec, made.seed);
                CHECK(errors.size() == one.tokens);
                const auto scores = run(made, {one}, pk::Isa::amx, false, all(made)).scores;
                for (std::size_t d = 0; d < 30; ++d) {
                    double score = 0.0, off = 0.0, length = 0.0;
                    for (std::size_t i = 0; i < dim; ++i) length += std::pow(vectors[d * dim + i], 2.0);
                    length = std::sqrt(length);
                    for (std::size_t t = 0; t < one.tokens; ++t) {
                        double own = 0.0;
                        for (std::size_t i = 0; i < dim; ++i) {
                            score += static_cast<double>(vectors[d * dim + i]) * one.data[t * dim + i];
                            own += std::pow(one.data[t * dim + i], 2.0);
                        }
                        // Rounding: of the decoded vector's rotation, of float dot products and of the score.
                        const double rounding = std::sqrt(own) * static_cast<double>(dim + 70) * 0x1p-24;
                        off += length * (errors[t] + rounding);
                    }
                    CHECK_THAT(std::fabs(scores[d] - score) <= off,
                               std::to_string(scores[d]) + " is not " + std::to_string(score));
                }
            }
        }
    }
}

void best_k() {
    check::place = "topk";
    check::Random random(7);
    for (int round = 0; round < 200; ++round) {
        std::vector<float> scores(random.below(60));
        for (float& score : scores) {
            score = random.below(6) == 0 ? kNothing : static_cast<float>(random.below(8)) - 4.0f;
        }
        const auto k = static_cast<std::int64_t>(1 + random.below(70));
        std::vector<std::int64_t> expected;
        for (std::size_t i = 0; i < scores.size(); ++i) {
            if (scores[i] != kNothing) expected.push_back(static_cast<std::int64_t>(i));
        }
        std::stable_sort(expected.begin(), expected.end(), [&](std::int64_t a, std::int64_t b) {
            return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
        });
        if (static_cast<std::int64_t>(expected.size()) > k) expected.resize(static_cast<std::size_t>(k));
        CHECK(pk::topk(scores.data(), static_cast<std::int64_t>(scores.size()), k) == expected);
    }
    CHECK_THROWS(pk::topk(nullptr, 0, 0), pk::ArgumentError, "k: ");
    CHECK_THROWS(pk::topk(nullptr, 0, -5), pk::ArgumentError, "k: ");
}

}  // namespace

int main() {
    const auto levels = check::levels();
    shapes(levels);
    extremes(levels);
    negatives(levels);
    selections(levels);
    not_finite(levels);
    queries();
    query_errors();
    best_k();
    return check::finish("test_scan");
}
