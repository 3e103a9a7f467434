// The dot-product extension of Armv8.2. It multiplies signed bytes with signed ones, so 8-bit codes lose their
// offset of 128 as they are loaded (0..15 of the 4-bit codes are the same either way).
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include "micro_neon.hpp"

namespace phasemesh::kernels {
namespace {

template <bool Offset>
struct DotOp : Wide128 {
    using Element = std::int32_t;
    using Acc = int32x4_t;
    using Column = int8x16_t;
    using Row = int8x16_t;
    static Acc zero() { return vdupq_n_s32(0); }
    static Column load(const std::uint8_t* p) { return vld1q_s8(reinterpret_cast<const std::int8_t*>(p)); }
    static Row broadcast(const std::uint8_t* p) {
        std::uint32_t word;
        std::memcpy(&word, p, 4);
        return vreinterpretq_s8_u32(vdupq_n_u32(Offset ? word ^ 0x80808080u : word));
    }
    static Acc mac(Acc acc, Column c, Row r) { return vdotq_s32(acc, c, r); }
};

}  // namespace

const Engine* engine_dotprod(Codec codec) {
    static const Engine int8{Pack::s8x4, nullptr, nullptr, scan_piece<DotOp<true>, Plain<DotOp<true>>>,
                             scan_piece<DotOp<true>, Scaled<DotOp<true>>>, nullptr, 0, 0, nullptr, nullptr,
                             keep_piece<DotOp<true>, Plain<DotOp<true>>>,
                             keep_piece<DotOp<true>, Scaled<DotOp<true>>>, nullptr};
    static const Engine int4{Pack::s8x4, stage_int4, nullptr, scan_piece<DotOp<false>, Plain<DotOp<false>>>,
                             scan_piece<DotOp<false>, Scaled<DotOp<false>>>, nullptr, 15, 1, nullptr, nullptr};
    if (codec == Codec::int8) return &int8;
    return codec == Codec::int4 ? &int4 : nullptr;
}

}  // namespace phasemesh::kernels
#endif
