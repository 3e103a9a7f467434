// What the AVX-512 files share; see micro_impl.hpp.
#pragma once

#include <immintrin.h>

#include "micro_impl.hpp"

namespace phasemesh::kernels {
namespace {

struct Wide512 {
    using Flt = __m512;
    using At = __m512i;
    static constexpr int kLanes = 16;
    // 8 tokens by 2 groups: 16 sums, enough to hide the latency of two multipliers, with registers to spare.
    static constexpr int kTokens = 8, kGroups = 2;
    static constexpr int kPrefetch = 8192;

    static __m512i get(const std::int32_t* p) { return _mm512_loadu_si512(p); }
    static __m512 get(const float* p) { return _mm512_loadu_ps(p); }
    static void put(std::int32_t* p, __m512i v) { _mm512_storeu_si512(p, v); }
    static void put(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
    static At get_at(const std::int32_t* p) { return _mm512_loadu_si512(p); }
    static void put_at(std::int32_t* p, At at) { _mm512_storeu_si512(p, at); }
    static __m512i raise(__m512i best, __m512i v) { return _mm512_max_epi32(best, v); }
    static __m512 raise(__m512 best, __m512 v) { return _mm512_max_ps(best, v); }
    static void raise_at(__m512i& best, At& at, __m512i v, std::int32_t position) {
        const __mmask16 above = _mm512_cmpgt_epi32_mask(v, best);
        best = _mm512_mask_mov_epi32(best, above, v);
        at = _mm512_mask_set1_epi32(at, above, position);
    }
    static void raise_at(__m512& best, At& at, __m512 v, std::int32_t position) {
        const __mmask16 above = _mm512_cmp_ps_mask(v, best, _CMP_GT_OQ);
        best = _mm512_mask_mov_ps(best, above, v);
        at = _mm512_mask_set1_epi32(at, above, position);
    }
    static __m512 scaled(__m512i acc, int shift, const std::int32_t* correction, float scale) {
        const __m512i v = _mm512_sub_epi32(_mm512_sll_epi32(acc, _mm_cvtsi32_si128(shift)),
                                           _mm512_loadu_si512(correction));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(v), _mm512_set1_ps(scale));
    }
};

inline float stage_int4_512(const std::uint8_t* codes, std::int64_t tokens, std::size_t dim, std::uint8_t* rows) {
    const std::size_t half = dim / 2;
    const __m512i low = _mm512_set1_epi8(0xf);
    for (std::int64_t t = 0; t < tokens; ++t, codes += half, rows += dim) {
        std::size_t i = 0;
        for (; i + 64 <= half; i += 64) {
            const __m512i both = _mm512_loadu_si512(codes + i);
            _mm512_storeu_si512(rows + i, _mm512_and_si512(both, low));
            _mm512_storeu_si512(rows + half + i, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
        }
        if (i < half) {
            const __mmask64 rest = ~0ull >> (64 - (half - i));
            const __m512i both = _mm512_maskz_loadu_epi8(rest, codes + i);
            _mm512_mask_storeu_epi8(rows + i, rest, _mm512_and_si512(both, low));
            _mm512_mask_storeu_epi8(rows + half + i, rest, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
        }
    }
    return 0.0f;
}

}  // namespace
}  // namespace phasemesh::kernels
