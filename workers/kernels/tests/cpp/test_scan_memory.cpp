// A scan reads its arrays where they lie, at any address, and nothing beside them: the pages before and after an
// array cannot be touched.
#include "brute.hpp"

using namespace brute;

namespace {

std::vector<float> run(const pk::PreparedQueries& ready, const pk::Documents& documents,
                       const pk::Selection& selection, std::size_t queries, std::vector<std::int32_t>* best) {
    std::vector<float> scores(static_cast<std::size_t>(selection.results()) * queries, 1.0f);
    pk::maxsim(ready, documents, selection, {}, scores.data(), best ? best->data() : nullptr);
    return scores;
}

void fences(const std::vector<pk::Isa>& levels) {
    check::Random random(11);
    for (const pk::Codec codec : kCodecs) {
        for (const std::size_t dim : {16, 48, 80, 112, 272, 768}) {
            // The last documents' lengths leave every remainder of a block of 2, 4, 8, 16 and 32 tokens.
            for (const std::int64_t length : {0, 1, 2, 3, 5, 6, 7, 8, 13, 15, 16, 17, 31, 33, 47}) {
                const bool scaled = pk::is_integer(codec) && length % 2;
                const Corpus made = corpus(random, codec, dim, scaled, {length, 3, 0, length});
                const Rows first = query(random, 17, dim), second = query(random, 16, dim);
                const std::vector<std::int64_t> numbers = {3, 0, 1};
                const std::vector<std::uint8_t> mask = {1, 0, 1, 1};
                for (const bool at_start : {false, true}) {
                    const check::Fenced codes(made.codes, at_start), scales(made.scales, at_start),
                        offsets(made.offsets, at_start), one(first.data, at_start), two(second.data, at_start),
                        some(numbers, at_start), masked(mask, at_start);
                    pk::Documents documents = made.view();
                    documents.codes = codes.bytes();
                    documents.offsets = offsets.as<std::int64_t>();
                    if (scaled) documents.scales = scales.as<float>();
                    pk::Selection range, indices, masks;
                    range.stop = 4;
                    indices.kind = pk::Selection::Kind::indices;
                    indices.indices = some.as<std::int64_t>();
                    indices.size = 3;
                    masks.kind = pk::Selection::Kind::mask;
                    masks.mask = masked.bytes();
                    masks.size = 4;
                    for (const pk::Isa isa : levels) {
                        check::place = std::string(name(codec)) + " fenced " + pk::name(isa);
                        const auto ready = pk::prepare({{one.as<float>(), 17}, {two.as<float>(), 16}}, dim, codec,
                                                       made.seed, scaled, isa);
                        std::vector<std::int32_t> best(4 * 33);
                        const auto scores = run(*ready, documents, range, 2, &best);
                        CHECK(scores == run(*ready, made.view(), range, 2, nullptr));
                        const auto few = run(*ready, documents, indices, 2, nullptr);
                        CHECK(few[0] == scores[3] && few[1] == scores[0] && few[2] == scores[1]);
                        CHECK(run(*ready, documents, masks, 2, nullptr)[3] == scores[3]);
                    }
                }
            }
        }
    }
}

void addresses(const std::vector<pk::Isa>& levels) {
    check::Random random(12);
    for (const pk::Codec codec : kCodecs) {
        for (const bool scaled : {false, true}) {
            if (scaled && !pk::is_integer(codec)) continue;
            const Corpus made = corpus(random, codec, 80, scaled, {21, 1, 0, 40});
            const Rows rows = query(random, 18, 80);
            pk::Selection range;
            range.stop = 4;
            for (const pk::Isa isa : levels) {
                check::place = std::string(name(codec)) + " unaligned " + pk::name(isa);
                const auto ready = pk::prepare({rows.view()}, 80, codec, made.seed, scaled, isa);
                const auto expected = run(*ready, made.view(), range, 1, nullptr);
                for (std::size_t shift = 1; shift < 64; ++shift) {
                    std::vector<std::uint8_t> moved(made.codes.size() + shift);
                    std::memcpy(moved.data() + shift, made.codes.data(), made.codes.size());
                    pk::Documents documents = made.view();
                    documents.codes = moved.data() + shift;
                    CHECK(run(*ready, documents, range, 1, nullptr) == expected);
                }
            }
        }
    }
}

// What a scan overlaps with: rows of other documents around a short one, whatever they hold.
void neighbours(const std::vector<pk::Isa>& levels) {
    check::Random random(13);
    for (const pk::Codec codec : kCodecs) {
        Corpus made = corpus(random, codec, 64, false, {20, 3, 20});
        const Rows rows = query(random, 5, 64);
        pk::Selection middle;
        middle.start = 1;
        middle.stop = 2;
        for (const pk::Isa isa : levels) {
            check::place = std::string(name(codec)) + " neighbours " + pk::name(isa);
            const auto ready = pk::prepare({rows.view()}, 64, codec, made.seed, false, isa);
            std::vector<std::int32_t> best(5), again(5);
            const auto before = run(*ready, made.view(), middle, 1, &best);
            Corpus other = made;
            for (std::size_t i = 0; i < other.codes.size(); ++i) {
                if (i < 20 * other.row() || i >= 23 * other.row()) other.codes[i] = 0xff;  // NaN of every float codec
            }
            CHECK(run(*ready, other.view(), middle, 1, &again) == before);
            CHECK(best == again);
        }
    }
}

void bandwidth() {
    check::place = "stream_read";
    const std::vector<std::uint8_t> bytes(100003, 1);
    for (const pk::Isa isa : pk::available()) {
        for (const int threads : {1, 3}) {
            for (const bool at_start : {false, true}) {
                const check::Fenced fenced(bytes, at_start);
                std::uint64_t sum = 0;
                const double seconds = pk::stream_read(fenced.bytes(), bytes.size(), threads, 2, isa, &sum);
                CHECK(seconds > 0.0 && sum > 0);
            }
        }
        CHECK_THROWS(pk::stream_read(bytes.data(), 5, 0, 1, isa, nullptr), pk::ArgumentError, "threads: ");
        CHECK_THROWS(pk::stream_read(bytes.data(), 5, 1, 0, isa, nullptr), pk::ArgumentError, "repeats: ");
    }
}

}  // namespace

int main() {
    const auto levels = check::levels();
    fences(levels);
    addresses(levels);
    neighbours(levels);
    bandwidth();
    return check::finish("test_scan_memory");
}
