#include "rotation.hpp"

#include <string>
#include <utility>

namespace phasemesh::kernels {
namespace {

class SplitMix64 {
   public:
    explicit SplitMix64(std::uint64_t seed) : state_(seed) {}
    std::uint64_t next() {
        std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    std::uint64_t below(std::uint64_t n) {
        const std::uint64_t unfair = (0 - n) % n;  // 2^64 mod n
        for (;;) {
            const std::uint64_t number = next();
            if (number >= unfair) return number % n;
        }
    }

   private:
    std::uint64_t state_;
};

void hadamard(float* row, std::size_t dim, std::size_t block) {
    for (std::size_t h = 1; h < block; h *= 2) {
        for (std::size_t start = 0; start < dim; start += 2 * h) {
            for (std::size_t i = start; i < start + h; ++i) {
                const float a = row[i], b = row[i + h];
                row[i] = a + b;
                row[i + h] = a - b;
            }
        }
    }
}

}  // namespace

Rotation::Rotation(std::size_t dim, std::uint64_t seed) : state_(std::make_unique<State>()) {
    if (dim == 0 || dim % kDimStep || dim > kMaxDim) {
        throw ArgumentError("dim: " + std::to_string(dim) + " is no multiple of 16 up to 4096");
    }
    State& state = *state_;
    state.dim = dim;
    state.block = dim & (0 - dim);
    const std::size_t rounds = state.block == dim ? 2 : 4;
    SplitMix64 numbers(seed);
    for (std::size_t r = 0; r < rounds; ++r) {
        State::Round round;
        if (state.block != dim) {
            for (std::size_t i = 0; i < dim; ++i) round.from.push_back(static_cast<std::uint32_t>(i));
            for (std::size_t i = dim - 1; i > 0; --i) std::swap(round.from[i], round.from[numbers.below(i + 1)]);
        }
        std::uint64_t bits = 0;
        for (std::size_t i = 0; i < dim; ++i) {
            if (i % 64 == 0) bits = numbers.next();
            round.sign.push_back((bits >> (i % 64)) & 1 ? -1.0f : 1.0f);
        }
        state.rounds.push_back(std::move(round));
        if (r % 2) state.scale /= static_cast<float>(state.block);
    }
}

Rotation::~Rotation() = default;
Rotation::Rotation(Rotation&&) noexcept = default;

std::size_t Rotation::dim() const { return state_->dim; }

void Rotation::forward(const float* rows, std::size_t count, float* out) const {
    const State& state = *state_;
    const std::size_t dim = state.dim;
    std::vector<float> now(dim), then(dim);
    for (std::size_t row = 0; row < count; ++row) {
        now.assign(rows + row * dim, rows + (row + 1) * dim);
        for (const State::Round& round : state.rounds) {
            for (std::size_t i = 0; i < dim; ++i) {
                then[i] = round.sign[i] * now[round.from.empty() ? i : round.from[i]];
            }
            hadamard(then.data(), dim, state.block);
            std::swap(now, then);
        }
        for (std::size_t i = 0; i < dim; ++i) out[row * dim + i] = now[i] * state.scale;
    }
}

void Rotation::backward(const float* rows, std::size_t count, float* out) const {
    const State& state = *state_;
    const std::size_t dim = state.dim;
    std::vector<float> now(dim), then(dim);
    for (std::size_t row = 0; row < count; ++row) {
        now.assign(rows + row * dim, rows + (row + 1) * dim);
        for (auto round = state.rounds.rbegin(); round != state.rounds.rend(); ++round) {
            hadamard(now.data(), dim, state.block);
            for (std::size_t i = 0; i < dim; ++i) {
                then[round->from.empty() ? i : round->from[i]] = round->sign[i] * now[i];
            }
            std::swap(now, then);
        }
        for (std::size_t i = 0; i < dim; ++i) out[row * dim + i] = now[i] * state.scale;
    }
}

}  // namespace phasemesh::kernels
