// AVX512-BF16: two products of bfloat16 per lane.
#if defined(__x86_64__) && defined(__AVX512BF16__)
#include "micro_avx512.hpp"

namespace phasemesh::kernels {
namespace {

struct Bf16Op : Wide512 {
    using Element = float;
    using Acc = __m512;
    using Column = __m512bh;
    using Row = __m512bh;
    static Acc zero() { return _mm512_setzero_ps(); }
    static Column load(const std::uint8_t* p) { return reinterpret_cast<__m512bh>(_mm512_load_si512(p)); }
    static Row broadcast(const std::uint8_t* p) {
        std::int32_t word;
        std::memcpy(&word, p, 4);
        return reinterpret_cast<__m512bh>(_mm512_set1_epi32(word));
    }
    // Spelled out for the reason given in micro_avx512.cpp.
    static Acc mac(Acc acc, Column c, Row r) {
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(r), "v"(c));
        return acc;
    }
};

}  // namespace

const Engine* engine_avx512bf16(Codec codec) {
    static const Engine bf16{Pack::bf16x2, nullptr, largest_bf16, nullptr, nullptr,
                             scan_piece<Bf16Op, Plain<Bf16Op>>, 0, 0, nullptr, nullptr};
    return codec == Codec::bf16 ? &bf16 : nullptr;
}

}  // namespace phasemesh::kernels
#endif
