// Hostile offsets, selections and sizes: a scan either refuses them with ArgumentError, exactly where its own
// reading of the rules does, or gives a score for every document. Deterministic: fuzz_scan -runs=N -seed=S.
#include "brute.hpp"

using namespace brute;

namespace {

constexpr std::int64_t kFar[] = {std::numeric_limits<std::int64_t>::min(),
                                 std::numeric_limits<std::int64_t>::min() + 1,
                                 -(std::int64_t{1} << 32),
                                 -1,
                                 0,
                                 1,
                                 std::numeric_limits<std::int32_t>::max(),
                                 std::int64_t{1} << 31,
                                 std::int64_t{1} << 32,
                                 std::int64_t{1} << 62,
                                 std::numeric_limits<std::int64_t>::max() - 1,
                                 std::numeric_limits<std::int64_t>::max()};

std::int64_t hostile(check::Random& random, std::int64_t near) {
    switch (random.below(4)) {
        case 0: return kFar[random.below(sizeof kFar / sizeof *kFar)];
        case 1: return static_cast<std::int64_t>(static_cast<std::uint64_t>(near) + random.below(5) - 2);
        case 2: return static_cast<std::int64_t>(random.next());
        default: return near == kFar[0] ? near : -near;
    }
}

struct Input {
    Corpus made;
    std::vector<std::int64_t> indices;
    std::vector<std::uint8_t> mask;
    pk::Selection selection;
};

Input input(check::Random& random) {
    constexpr std::size_t kDims[] = {16, 48, 64, 80, 112, 128};
    Input one;
    std::vector<std::int64_t> lengths(random.below(12));
    for (std::int64_t& length : lengths) length = static_cast<std::int64_t>(random.below(3) ? random.below(40) : 0);
    const pk::Codec codec = kCodecs[random.below(5)];
    one.made = corpus(random, codec, kDims[random.below(6)], pk::is_integer(codec) && random.below(3) == 0, lengths);
    const std::int64_t n = one.made.count();
    if (random.below(2)) {
        for (std::uint64_t i = random.below(3) + 1; i > 0; --i) {
            std::int64_t& offset = one.made.offsets[random.below(one.made.offsets.size())];
            offset = hostile(random, offset);
        }
    }
    pk::Selection& selection = one.selection;
    const bool bad = random.below(2);
    switch (random.below(3)) {
        case 0:
            selection.start = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(n) + 1));
            selection.stop = selection.start + static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(n - selection.start) + 1));
            if (bad) selection.start = hostile(random, selection.start);
            if (bad && random.below(2)) selection.stop = hostile(random, selection.stop);
            break;
        case 1:
            selection.kind = pk::Selection::Kind::indices;
            one.indices.resize(n ? random.below(30) : random.below(2));
            for (std::int64_t& index : one.indices) {
                index = n ? static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(n))) : 0;
            }
            if (bad && !one.indices.empty()) {
                std::int64_t& index = one.indices[random.below(one.indices.size())];
                index = hostile(random, index);
            }
            selection.size = static_cast<std::int64_t>(one.indices.size());
            break;
        default:
            selection.kind = pk::Selection::Kind::mask;
            one.mask.resize(bad ? random.below(20) : static_cast<std::size_t>(n));
            for (std::uint8_t& byte : one.mask) byte = static_cast<std::uint8_t>(random.below(3));
            selection.size = static_cast<std::int64_t>(one.mask.size());
    }
    return one;
}

// The rules, read once more.
bool acceptable(const Input& input, std::int64_t tokens) {
    const auto& offsets = input.made.offsets;
    const std::int64_t n = input.made.count();
    const auto sound = [&](std::int64_t i) {
        return offsets[i] >= 0 && offsets[i] <= offsets[i + 1] && offsets[i + 1] <= tokens;
    };
    const pk::Selection& selection = input.selection;
    if (selection.kind == pk::Selection::Kind::range) {
        if (selection.start < 0 || selection.start > selection.stop || selection.stop > n) return false;
        for (std::int64_t i = selection.start; i < selection.stop; ++i) {
            if (!sound(i)) return false;
        }
        return true;
    }
    if (selection.kind == pk::Selection::Kind::mask) {
        if (selection.size != n) return false;
        for (std::int64_t i = 0; i < n; ++i) {
            if (input.mask[i] && !sound(i)) return false;
        }
        return true;
    }
    return std::all_of(input.indices.begin(), input.indices.end(),
                       [&](std::int64_t index) { return index >= 0 && index < n && sound(index); });
}

void one_run(check::Random& random, const std::vector<pk::Isa>& levels) {
    Input in = input(random);
    in.selection.indices = in.indices.data();
    in.selection.mask = in.mask.data();
    const Corpus& made = in.made;
    const pk::Isa isa = levels[random.below(levels.size())];
    const Rows rows = query(random, 1 + random.below(40), made.dim);
    const auto ready = pk::prepare({rows.view()}, made.dim, made.codec, made.seed, !made.scales.empty(), isa);
    const pk::Documents documents = made.view();
    const bool good = acceptable(in, documents.tokens);
    const std::size_t results = good ? static_cast<std::size_t>(in.selection.results()) : 0;
    std::vector<float> scores(results, 1e30f);
    std::vector<std::int32_t> best(results * rows.tokens, -7);
    pk::Options options;
    options.threads = 1 + static_cast<int>(random.below(3));
    try {
        pk::maxsim(*ready, documents, in.selection, options, scores.data(), random.below(2) ? best.data() : nullptr);
        CHECK(good);
    } catch (const pk::ArgumentError& error) {
        const std::string what = error.what();
        CHECK_THAT(!good, what);
        CHECK_THAT(what.rfind("offsets: ", 0) == 0 || what.rfind("select: ", 0) == 0, what);
        return;
    }
    for (std::size_t i = 0; i < results; ++i) {
        std::int64_t d = static_cast<std::int64_t>(i);
        if (in.selection.kind == pk::Selection::Kind::range) d += in.selection.start;
        if (in.selection.kind == pk::Selection::Kind::indices) d = in.indices[i];
        const bool none = (in.selection.kind == pk::Selection::Kind::mask && !in.mask[i]) ||
                          made.offsets[d] == made.offsets[d + 1];
        CHECK(none ? scores[i] == -HUGE_VALF : std::fabs(scores[i]) < 1e20f);
    }
}

}  // namespace

int main(int argc, char** argv) {
    std::uint64_t runs = 2000, seed = 1;
    for (int i = 1; i < argc; ++i) {
        if (std::strncmp(argv[i], "-runs=", 6) == 0) runs = std::strtoull(argv[i] + 6, nullptr, 10);
        if (std::strncmp(argv[i], "-seed=", 6) == 0) seed = std::strtoull(argv[i] + 6, nullptr, 10);
    }
    const auto levels = check::levels();
    for (std::uint64_t run = 0; run < runs; ++run) {
        // Each run has its own numbers: one that fails repeats with -runs=1 -seed=<seed + run>.
        check::Random random((seed + run) * 0x2545f4914f6cdd1du);
        check::place = "-runs=1 -seed=" + std::to_string(seed + run);
        one_run(random, levels);
    }
    return check::finish("fuzz_scan");
}
