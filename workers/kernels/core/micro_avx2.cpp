// AVX2. Its 8-bit multiply-add saturates at 16 bits, so codes are widened to 16 bits first, once per piece.
#if defined(__x86_64__) && defined(__AVX2__)
#include "micro_avx2.hpp"

namespace phasemesh::kernels {
namespace {

struct MaddOp : Wide256 {
    using Element = std::int32_t;
    using Acc = __m256i;
    using Column = __m256i;
    using Row = __m256i;
    static Acc zero() { return _mm256_setzero_si256(); }
    static Column load(const std::uint8_t* p) { return load256(p); }
    static Row broadcast(const std::uint8_t* p) { return broadcast256(p); }
    static Acc mac(Acc acc, Column c, Row r) { return _mm256_add_epi32(acc, _mm256_madd_epi16(c, r)); }
};

struct FmaOp : Wide256 {
    using Element = float;
    using Acc = __m256;
    using Column = __m256;
    using Row = __m256;
    static Acc zero() { return _mm256_setzero_ps(); }
    static Column load(const std::uint8_t* p) { return _mm256_load_ps(reinterpret_cast<const float*>(p)); }
    static Row broadcast(const std::uint8_t* p) {
        float word;
        std::memcpy(&word, p, 4);
        return _mm256_set1_ps(word);
    }
    static Acc mac(Acc acc, Column c, Row r) { return _mm256_fmadd_ps(c, r, acc); }
};

float stage_f16_wide(const std::uint8_t* codes, std::int64_t tokens, std::size_t dim, std::uint8_t* rows) {
    const std::size_t count = static_cast<std::size_t>(tokens) * dim;  // a multiple of 16
    __m128i worst = _mm_setzero_si128();
    const __m128i magnitude = _mm_set1_epi16(0x7fff);
    for (std::size_t i = 0; i < count; i += 8) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 2 * i));
        worst = _mm_max_epu16(worst, _mm_and_si128(half, magnitude));
        _mm256_storeu_ps(reinterpret_cast<float*>(rows + 4 * i), _mm256_cvtph_ps(half));
    }
    alignas(16) std::uint16_t lanes[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(lanes), worst);
    std::uint16_t most = 0;
    for (const std::uint16_t lane : lanes) most = lane > most ? lane : most;
    return _cvtsh_ss(most);
}

}  // namespace

const Engine* engine_avx2(Codec codec) {
    static const Engine int8{Pack::s16x2, stage_int8_wide, nullptr, scan_piece<MaddOp, Plain<MaddOp>>,
                             scan_piece<MaddOp, Scaled<MaddOp>>, nullptr, 128, 0, nullptr, nullptr,
                             keep_piece<MaddOp, Plain<MaddOp>>,
                             keep_piece<MaddOp, Scaled<MaddOp>>, nullptr};
    static const Engine int4{Pack::s16x2, stage_int4_wide, nullptr, scan_piece<MaddOp, Plain<MaddOp>>,
                             scan_piece<MaddOp, Scaled<MaddOp>>, nullptr, 15, 1, nullptr, nullptr};
    static const Engine bf16{Pack::f32x1, stage_bf16, nullptr, nullptr, nullptr,
                             scan_piece<FmaOp, Plain<FmaOp>>, 0, 0, nullptr, nullptr};
    static const Engine f16{Pack::f32x1, stage_f16_wide, nullptr, nullptr, nullptr,
                            scan_piece<FmaOp, Plain<FmaOp>>, 0, 0, nullptr, nullptr,
                            nullptr, nullptr, keep_piece<FmaOp, Plain<FmaOp>>};
    static const Engine f32{Pack::f32x1, stage_f32, nullptr, nullptr, nullptr,
                            scan_piece<FmaOp, Plain<FmaOp>>, 0, 0, nullptr, nullptr};
    switch (codec) {
        case Codec::int8: return &int8;
        case Codec::int4: return &int4;
        case Codec::bf16: return &bf16;
        case Codec::f16: return &f16;
        case Codec::f32: return &f32;
    }
    return nullptr;
}

}  // namespace phasemesh::kernels
#endif
