// AVX-512: VNNI for 8-bit codes, fused multiply-add for float ones.
#if defined(__x86_64__) && defined(__AVX512F__)
#include <immintrin.h>

#include "micro_avx512.hpp"

namespace phasemesh::kernels {
namespace {

struct VnniOp : Wide512 {
    using Element = std::int32_t;
    using Acc = __m512i;
    using Column = __m512i;
    using Row = __m512i;
    static Acc zero() { return _mm512_setzero_si512(); }
    static Column load(const std::uint8_t* p) { return _mm512_load_si512(p); }
    static Row broadcast(const std::uint8_t* p) {
        std::int32_t word;
        std::memcpy(&word, p, 4);
        return _mm512_set1_epi32(word);
    }
    // Spelled out: from the intrinsic, GCC 12 moves every sum through a second register at each step, which costs
    // a quarter of the speed.
    static Acc mac(Acc acc, Column c, Row r) {
        __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(r), "v"(c));
        return acc;
    }
};

struct FmaOp : Wide512 {
    using Element = float;
    using Acc = __m512;
    using Column = __m512;
    using Row = __m512;
    static Acc zero() { return _mm512_setzero_ps(); }
    static Column load(const std::uint8_t* p) { return _mm512_load_ps(p); }
    static Row broadcast(const std::uint8_t* p) {
        float word;
        std::memcpy(&word, p, 4);
        return _mm512_set1_ps(word);
    }
    static Acc mac(Acc acc, Column c, Row r) {
        __asm__("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(r), "v"(c));
        return acc;
    }
};

float stage_f16_wide(const std::uint8_t* codes, std::int64_t tokens, std::size_t dim, std::uint8_t* rows) {
    const std::size_t count = static_cast<std::size_t>(tokens) * dim;  // a multiple of 16
    // Of binary16 without its sign, the integer's order is the value's, infinities and NaN above all.
    __m256i worst = _mm256_setzero_si256();
    const __m256i magnitude = _mm256_set1_epi16(0x7fff);
    for (std::size_t i = 0; i < count; i += 16) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 2 * i));
        worst = _mm256_max_epu16(worst, _mm256_and_si256(half, magnitude));
        _mm512_storeu_ps(rows + 4 * i, _mm512_cvtph_ps(half));
    }
    alignas(32) std::uint16_t lanes[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), worst);
    std::uint16_t most = 0;
    for (const std::uint16_t lane : lanes) most = lane > most ? lane : most;
    return _cvtsh_ss(most);
}

}  // namespace

const Engine* engine_avx512(Codec codec) {
    static const Engine int8{Pack::s8x4, nullptr, nullptr, scan_piece<VnniOp, Plain<VnniOp>>,
                             scan_piece<VnniOp, Scaled<VnniOp>>, nullptr, 128, 0, nullptr, nullptr,
                             keep_piece<VnniOp, Plain<VnniOp>>,
                             keep_piece<VnniOp, Scaled<VnniOp>>, nullptr};
    static const Engine int4{Pack::s8x4, stage_int4_512, nullptr, scan_piece<VnniOp, Plain<VnniOp>>,
                             scan_piece<VnniOp, Scaled<VnniOp>>, nullptr, 15, 1, nullptr, nullptr};
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
