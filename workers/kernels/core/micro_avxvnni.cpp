// AVX-VNNI: the 8-bit dot product of AVX512-VNNI in 256-bit registers, on processors without AVX-512.
#if defined(__x86_64__) && defined(__AVXVNNI__)
#include "micro_avx2.hpp"

namespace phasemesh::kernels {
namespace {

struct VnniOp : Wide256 {
    using Element = std::int32_t;
    using Acc = __m256i;
    using Column = __m256i;
    using Row = __m256i;
    static Acc zero() { return _mm256_setzero_si256(); }
    static Column load(const std::uint8_t* p) { return load256(p); }
    static Row broadcast(const std::uint8_t* p) { return broadcast256(p); }
    // Spelled out for the reason given in micro_avx512.cpp.
    static Acc mac(Acc acc, Column c, Row r) {
        __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(r), "x"(c));
        return acc;
    }
};

}  // namespace

const Engine* engine_avxvnni(Codec codec) {
    static const Engine int8{Pack::s8x4, nullptr, nullptr, scan_piece<VnniOp, Plain<VnniOp>>,
                             scan_piece<VnniOp, Scaled<VnniOp>>, nullptr, 128, 0, nullptr, nullptr,
                             keep_piece<VnniOp, Plain<VnniOp>>,
                             keep_piece<VnniOp, Scaled<VnniOp>>, nullptr};
    static const Engine int4{Pack::s8x4, stage_int4, nullptr, scan_piece<VnniOp, Plain<VnniOp>>,
                             scan_piece<VnniOp, Scaled<VnniOp>>, nullptr, 15, 1, nullptr, nullptr};
    if (codec == Codec::int8) return &int8;
    return codec == Codec::int4 ? &int4 : nullptr;
}

}  // namespace phasemesh::kernels
#endif
