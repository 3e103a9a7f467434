// Plain C++, and what every other path is held against.
#include "exact_impl.hpp"

namespace phasemesh::kernels {
namespace {

// binary16 to binary64 with integer arithmetic alone; exact, subnormals included.
void widen(const std::uint8_t* half, std::size_t dim, double* wide) {
    for (std::size_t i = 0; i < dim; ++i) {
        std::uint16_t word;
        std::memcpy(&word, half + 2 * i, 2);
        // The exponent is rebased by a multiplication, which normalises subnormals on the way.
        const std::uint64_t shifted = static_cast<std::uint64_t>(word & 0x7fffu) << 42;
        double value;
        std::memcpy(&value, &shifted, 8);
        value *= 0x1p1008;
        wide[i] = word & 0x8000u ? -value : value;
    }
}

}  // namespace

const ExactCode& exact_portable() {
    static const ExactCode code{widen, raise_exact, reach_plain<std::int32_t>, reach_plain<float>};
    return code;
}

}  // namespace phasemesh::kernels
