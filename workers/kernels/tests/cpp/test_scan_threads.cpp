// Threads change nothing but the time; a scan ends early when it is called off or when its checkpoint throws; one
// prepared query serves many scans at once.
#include <atomic>
#include <stdexcept>
#include <thread>

#include "brute.hpp"

using namespace brute;

namespace {

// Enough work for several chunks: 1024 x 1024 products a token.
struct Large {
    Corpus made;
    Rows rows;
    std::vector<std::int64_t> numbers;

    explicit Large(pk::Codec codec, bool scaled = false) {
        check::Random random(21);
        std::vector<std::int64_t> lengths;
        for (int i = 0; i < 60; ++i) lengths.push_back(static_cast<std::int64_t>(random.below(9)));
        made = corpus(random, codec, 1024, scaled, lengths);
        rows = query(random, 1024, 1024);
    }
    pk::Selection selection(std::int64_t repeats) {
        numbers.clear();
        for (std::int64_t r = 0; r < repeats; ++r) {
            for (std::int64_t d = 0; d < made.count(); ++d) numbers.push_back(made.count() - 1 - d);
        }
        pk::Selection some;
        some.kind = pk::Selection::Kind::indices;
        some.indices = numbers.data();
        some.size = static_cast<std::int64_t>(numbers.size());
        return some;
    }
    std::shared_ptr<const pk::PreparedQueries> ready() const {
        return pk::prepare({rows.view()}, 1024, made.codec, made.seed, !made.scales.empty(), pk::Isa::amx);
    }
};

void counts() {
    for (const pk::Codec codec : kCodecs) {
        Large large(codec, codec == pk::Codec::int4);
        const auto ready = large.ready();
        const pk::Selection some = large.selection(3);
        const auto n = static_cast<std::size_t>(some.size);
        std::vector<float> first;
        std::vector<std::int32_t> first_best;
        for (const int threads : {1, 2, 5, 1000000}) {
            check::place = std::string(name(codec)) + " threads " + std::to_string(threads);
            pk::Options options;
            options.threads = threads;
            std::vector<float> scores(n, 3.0f);
            std::vector<std::int32_t> best(n * 1024, 3);
            pk::maxsim(*ready, large.made.view(), some, options, scores.data(), best.data());
            if (threads == 1) {
                first = scores;
                first_best = best;
            }
            CHECK(scores == first);
            CHECK(best == first_best);
        }
    }
    check::place = "threads 0";
    Large large(pk::Codec::int8);
    pk::Options options;
    for (const int threads : {0, -1}) {
        options.threads = threads;
        std::vector<float> scores(static_cast<std::size_t>(large.made.count()));
        CHECK_THROWS(
            pk::maxsim(*large.ready(), large.made.view(), large.selection(1), options, scores.data(), nullptr),
            pk::ArgumentError, "threads: ");
    }
}

// Hours of work, called off once it has begun.
void cancels() {
    for (const int threads : {1, 3}) {
        for (const bool one_document : {false, true}) {
            check::place = "cancel with " + std::to_string(threads) + (one_document ? ", one document" : "");
            Large large(pk::Codec::int8);
            pk::Selection some = large.selection(100000);
            pk::Documents documents = large.made.view();
            std::vector<std::uint8_t> long_one;
            std::vector<std::int64_t> bounds;
            if (one_document) {
                // Seconds at the least for a single one.
                long_one.assign(std::size_t{100000} * 1024, 7);
                bounds = {0, 100000};
                documents.codes = long_one.data();
                documents.tokens = 100000;
                documents.offsets = bounds.data();
                documents.count = 1;
                some.size = 1000;
                std::fill(large.numbers.begin(), large.numbers.end(), 0);
            }
            std::atomic<bool> cancel{false}, begun{false};
            pk::Options options;
            options.threads = threads;
            options.cancel = &cancel;
            int calls = 0;
            options.checkpoint = [&] {
                if (++calls == 3) begun = true;
            };
            std::thread other([&] {
                while (!begun) std::this_thread::yield();
                cancel = true;
            });
            std::vector<float> scores(static_cast<std::size_t>(some.size));
            CHECK_THROWS(pk::maxsim(*large.ready(), documents, some, options, scores.data(), nullptr), pk::Cancelled,
                         "cancelled");
            other.join();
            // Called off before it begins.
            CHECK_THROWS(pk::maxsim(*large.ready(), documents, some, options, scores.data(), nullptr), pk::Cancelled,
                         "cancelled");
        }
    }
}

void checkpoints() {
    for (const int threads : {1, 3}) {
        for (const int at : {1, 2, 5}) {
            check::place = "checkpoint " + std::to_string(at) + " with " + std::to_string(threads);
            Large large(pk::Codec::int8);
            const pk::Selection some = large.selection(100000);
            const auto caller = std::this_thread::get_id();
            int calls = 0;
            bool own = true;
            pk::Options options;
            options.threads = threads;
            options.checkpoint = [&] {
                own = own && std::this_thread::get_id() == caller;
                if (++calls == at) throw std::runtime_error("enough");
            };
            std::vector<float> scores(static_cast<std::size_t>(some.size));
            CHECK_THROWS(
                pk::maxsim(*large.ready(), large.made.view(), some, options, scores.data(), nullptr),
                std::runtime_error, "enough");
            CHECK(calls == at);
            CHECK(own);
        }
    }
}

// A checkpoint may scan by itself, on the same thread: tile registers, where there are any, are one per thread.
void nested() {
    check::Random random(22);
    const Corpus other = corpus(random, pk::Codec::int8, 48, false, {3, 40});
    const Rows short_one = query(random, 3, 48);
    for (const pk::Codec codec : kCodecs) {
        Large large(codec);
        const pk::Selection some = large.selection(1);
        for (const pk::Isa isa : check::levels()) {
            check::place = std::string(name(codec)) + " nested " + pk::name(isa);
            const auto ready = pk::prepare({{large.rows.data.data(), 20}}, 1024, codec, large.made.seed, false, isa);
            const auto inner = pk::prepare({short_one.view()}, 48, pk::Codec::int8, other.seed, false, isa);
            std::vector<float> plain(static_cast<std::size_t>(some.size)), nested(plain.size());
            pk::maxsim(*ready, large.made.view(), some, {}, plain.data(), nullptr);
            int calls = 0;
            pk::Options options;
            options.checkpoint = [&] {
                ++calls;
                std::vector<float> scores(2);
                pk::Selection both;
                both.stop = 2;
                pk::maxsim(*inner, other.view(), both, {}, scores.data(), nullptr);
                CHECK(scores[0] != scores[1]);
            };
            pk::maxsim(*ready, large.made.view(), some, options, nested.data(), nullptr);
            CHECK(calls >= 1);
            CHECK(nested == plain);
        }
    }
}

void at_once() {
    check::place = "many scans at once";
    Large large(pk::Codec::bf16);
    const auto ready = large.ready();
    const pk::Selection some = large.selection(1);
    const auto n = static_cast<std::size_t>(some.size);
    std::vector<std::vector<float>> scores(4, std::vector<float>(n));
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < scores.size(); ++i) {
        threads.emplace_back([&, i] {
            pk::Options options;
            options.threads = 2;
            pk::maxsim(*ready, large.made.view(), some, options, scores[i].data(), nullptr);
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& one : scores) CHECK(one == scores[0]);
}

// The document that is named doesn't depend on which thread comes upon which first.
void first_of_many() {
    check::place = "not finite, many threads";
    Large large(pk::Codec::f32);
    std::int64_t first = -1;
    for (std::int64_t d = 5; d < large.made.count(); d += 5) {
        if (large.made.offsets[d] == large.made.offsets[d + 1]) continue;
        if (first < 0) first = d;
        std::memset(large.made.codes.data() + large.made.offsets[d] * 4096, 0xff, 4);
    }
    for (int round = 0; round < 3; ++round) {
        pk::Options options;
        options.threads = 3;
        const pk::Selection some = large.selection(2);
        std::vector<float> scores(static_cast<std::size_t>(some.size));
        CHECK_THROWS(pk::maxsim(*large.ready(), large.made.view(), some, options, scores.data(), nullptr),
                     pk::ArgumentError, "codes: document " + std::to_string(first) + " ");
    }
}

}  // namespace

int main() {
    counts();
    cancels();
    checkpoints();
    nested();
    at_once();
    first_of_many();
    return check::finish("test_scan_threads");
}
