// NEON for float codecs. Integer codecs need the dot-product extension, see micro_dotprod.cpp.
#if defined(__aarch64__)
#include "micro_neon.hpp"

namespace phasemesh::kernels {
namespace {

struct FmaOp : Wide128 {
    using Element = float;
    using Acc = float32x4_t;
    using Column = float32x4_t;
    using Row = float32x4_t;
    static Acc zero() { return vdupq_n_f32(0.0f); }
    static Column load(const std::uint8_t* p) { return vld1q_f32(reinterpret_cast<const float*>(p)); }
    static Row broadcast(const std::uint8_t* p) {
        float word;
        std::memcpy(&word, p, 4);
        return vdupq_n_f32(word);
    }
    static Acc mac(Acc acc, Column c, Row r) { return vfmaq_f32(acc, c, r); }
};

}  // namespace

const Engine* engine_neon(Codec codec) {
    static const Engine bf16{Pack::f32x1, stage_bf16, nullptr, nullptr, nullptr,
                             scan_piece<FmaOp, Plain<FmaOp>>, 0, 0, nullptr, nullptr};
    static const Engine f16{Pack::f32x1, stage_f16, nullptr, nullptr, nullptr,
                            scan_piece<FmaOp, Plain<FmaOp>>, 0, 0, nullptr, nullptr,
                            nullptr, nullptr, keep_piece<FmaOp, Plain<FmaOp>>};
    static const Engine f32{Pack::f32x1, stage_f32, nullptr, nullptr, nullptr,
                            scan_piece<FmaOp, Plain<FmaOp>>, 0, 0, nullptr, nullptr};
    switch (codec) {
        case Codec::bf16: return &bf16;
        case Codec::f16: return &f16;
        case Codec::f32: return &f32;
        default: return nullptr;
    }
}

}  // namespace phasemesh::kernels
#endif
