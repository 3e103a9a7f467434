// The exact arithmetic, once, compiled with the flags of every file that includes it. There is nothing in it that
// the flags could change: products are exact, so that fusing a multiplication with its addition rounds alike, and
// the order of additions is written out.
#pragma once

#include <cstring>

#include "exact.hpp"
#include "micro.hpp"

namespace phasemesh::kernels {
namespace {

typedef double Lanes __attribute__((vector_size(8 * kLanes)));

inline __attribute__((always_inline)) double sum_lanes(const Lanes& lanes) {
    const double half[4] = {lanes[0] + lanes[4], lanes[1] + lanes[5], lanes[2] + lanes[6], lanes[3] + lanes[7]};
    return (half[0] + half[2]) + (half[1] + half[3]);
}

// dim is a multiple of kDimStep.
inline void raise_exact(const double* wide, const double* query, std::size_t dim, const std::int32_t* columns,
                        std::size_t count, double* best) {
    for (std::size_t i = 0; i < count; ++i) {
        const double* column = query + static_cast<std::size_t>(columns[i]) * dim;
        Lanes sum = {};
        for (std::size_t e = 0; e < dim; e += kLanes) {
            Lanes row, other;
            std::memcpy(&row, wide + e, sizeof row);
            std::memcpy(&other, column + e, sizeof other);
            sum += row * other;
        }
        const double value = sum_lanes(sum);
        double& known = best[columns[i]];
        known = value > known ? value : known;
    }
}

template <class Element>
inline std::uint32_t reach_plain(const Element* value, const Element* floor) {
    std::uint32_t mask = 0;
    for (std::size_t l = 0; l < kGroup; ++l) mask |= static_cast<std::uint32_t>(value[l] >= floor[l]) << l;
    return mask;
}

}  // namespace
}  // namespace phasemesh::kernels
