#if defined(__x86_64__) && defined(__AVX2__)
#include <immintrin.h>

#include "exact_impl.hpp"

namespace phasemesh::kernels {
namespace {

void widen(const std::uint8_t* half, std::size_t dim, double* wide) {
    for (std::size_t i = 0; i < dim; i += 8) {
        const __m256 single = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(half + 2 * i)));
        _mm256_storeu_pd(wide + i, _mm256_cvtps_pd(_mm256_castps256_ps128(single)));
        _mm256_storeu_pd(wide + i + 4, _mm256_cvtps_pd(_mm256_extractf128_ps(single, 1)));
    }
}

std::uint32_t reach_integer(const std::int32_t* value, const std::int32_t* floor) {
    std::uint32_t below = 0;
    for (int i = 0; i < 2; ++i) {
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(value + 8 * i));
        const __m256i f = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(floor + 8 * i));
        const int mask = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(f, v)));
        below |= static_cast<std::uint32_t>(mask) << (8 * i);
    }
    return below ^ 0xffffu;
}

std::uint32_t reach_float(const float* value, const float* floor) {
    std::uint32_t above = 0;
    for (int i = 0; i < 2; ++i) {
        const __m256 reached =
            _mm256_cmp_ps(_mm256_loadu_ps(value + 8 * i), _mm256_loadu_ps(floor + 8 * i), _CMP_GE_OQ);
        above |= static_cast<std::uint32_t>(_mm256_movemask_ps(reached)) << (8 * i);
    }
    return above;
}

}  // namespace

const ExactCode& exact_avx2() {
    static const ExactCode code{widen, raise_exact, reach_integer, reach_float};
    return code;
}

}  // namespace phasemesh::kernels
#endif
