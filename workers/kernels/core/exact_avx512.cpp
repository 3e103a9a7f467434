#if defined(__x86_64__) && defined(__AVX512F__)
#include <immintrin.h>

#include "exact_impl.hpp"

namespace phasemesh::kernels {
namespace {

void widen(const std::uint8_t* half, std::size_t dim, double* wide) {
    for (std::size_t i = 0; i < dim; i += 8) {
        const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(half + 2 * i));
        _mm512_storeu_pd(wide + i, _mm512_cvtps_pd(_mm256_cvtph_ps(words)));
    }
}

std::uint32_t reach_integer(const std::int32_t* value, const std::int32_t* floor) {
    return _mm512_cmpge_epi32_mask(_mm512_loadu_si512(value), _mm512_loadu_si512(floor));
}

std::uint32_t reach_float(const float* value, const float* floor) {
    return _mm512_cmp_ps_mask(_mm512_loadu_ps(value), _mm512_loadu_ps(floor), _CMP_GE_OQ);
}

}  // namespace

const ExactCode& exact_avx512() {
    static const ExactCode code{widen, raise_exact, reach_integer, reach_float};
    return code;
}

}  // namespace phasemesh::kernels
#endif
