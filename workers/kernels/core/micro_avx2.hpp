// What the files for 256-bit vectors share; see micro_impl.hpp.
#pragma once

#include <immintrin.h>

#include "micro_impl.hpp"

namespace phasemesh::kernels {
namespace {

struct Wide256 {
    using Flt = __m256;
    using At = __m256i;
    static constexpr int kLanes = 8;
    // 4 tokens by one group of two vectors: 8 sums, 2 columns, a token and the rest in 16 registers.
    static constexpr int kTokens = 4, kGroups = 1;
    static constexpr int kPrefetch = 0;

    static __m256i get(const std::int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static __m256 get(const float* p) { return _mm256_loadu_ps(p); }
    static void put(std::int32_t* p, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
    static void put(float* p, __m256 v) { _mm256_storeu_ps(p, v); }
    static At get_at(const std::int32_t* p) { return get(p); }
    static void put_at(std::int32_t* p, At at) { put(p, at); }
    static __m256i raise(__m256i best, __m256i v) { return _mm256_max_epi32(best, v); }
    static __m256 raise(__m256 best, __m256 v) { return _mm256_max_ps(best, v); }
    static void raise_at(__m256i& best, At& at, __m256i v, std::int32_t position) {
        const __m256i above = _mm256_cmpgt_epi32(v, best);
        best = _mm256_blendv_epi8(best, v, above);
        at = _mm256_blendv_epi8(at, _mm256_set1_epi32(position), above);
    }
    static void raise_at(__m256& best, At& at, __m256 v, std::int32_t position) {
        const __m256 above = _mm256_cmp_ps(v, best, _CMP_GT_OQ);
        best = _mm256_blendv_ps(best, v, above);
        at = _mm256_blendv_epi8(at, _mm256_set1_epi32(position), _mm256_castps_si256(above));
    }
    static __m256 scaled(__m256i acc, int shift, const std::int32_t* correction, float scale) {
        const __m256i v = _mm256_sub_epi32(_mm256_sll_epi32(acc, _mm_cvtsi32_si128(shift)), get(correction));
        return _mm256_mul_ps(_mm256_cvtepi32_ps(v), _mm256_set1_ps(scale));
    }
    static __m256i load256(const std::uint8_t* p) {
        return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
    }
    static __m256i broadcast256(const std::uint8_t* p) {
        std::int32_t word;
        std::memcpy(&word, p, 4);
        return _mm256_set1_epi32(word);
    }
};

}  // namespace
}  // namespace phasemesh::kernels
