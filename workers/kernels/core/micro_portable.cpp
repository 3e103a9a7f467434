// Plain C++: every other path is held against it.
#include <limits>

#include "micro_impl.hpp"

namespace phasemesh::kernels {
namespace {

struct Base {
    struct At {
        std::int32_t lane[16];
    };
    static constexpr int kLanes = 16, kTokens = 2, kGroups = 1, kPrefetch = 0;
    static At get_at(const std::int32_t* p) {
        At at;
        std::memcpy(&at, p, sizeof at);
        return at;
    }
    static void put_at(std::int32_t* p, At at) { std::memcpy(p, &at, sizeof at); }
    template <class Vector>
    static Vector raise(Vector best, Vector v) {
        for (int i = 0; i < 16; ++i) best.lane[i] = v.lane[i] > best.lane[i] ? v.lane[i] : best.lane[i];
        return best;
    }
    template <class Vector>
    static void raise_at(Vector& best, At& at, Vector v, std::int32_t position) {
        for (int i = 0; i < 16; ++i) {
            const bool above = v.lane[i] > best.lane[i];
            best.lane[i] = above ? v.lane[i] : best.lane[i];
            at.lane[i] = above ? position : at.lane[i];
        }
    }
};

struct Floats {
    float lane[16];
};

struct IntegerOp : Base {
    using Element = std::int32_t;
    struct Acc {
        std::int32_t lane[16];
    };
    using Flt = Floats;
    struct Column {
        std::int16_t half[32];
    };
    struct Row {
        std::int16_t half[2];
    };
    static Acc zero() { return Acc{}; }
    static Column load(const std::uint8_t* p) {
        Column c;
        std::memcpy(&c, p, sizeof c);
        return c;
    }
    static Row broadcast(const std::uint8_t* p) {
        Row r;
        std::memcpy(&r, p, sizeof r);
        return r;
    }
    static Acc mac(Acc acc, const Column& c, Row r) {
        for (int i = 0; i < 16; ++i) {
            acc.lane[i] += c.half[2 * i] * r.half[0] + c.half[2 * i + 1] * r.half[1];
        }
        return acc;
    }
    static Acc get(const std::int32_t* p) {
        Acc a;
        std::memcpy(&a, p, sizeof a);
        return a;
    }
    static Flt get(const float* p) {
        Flt f;
        std::memcpy(&f, p, sizeof f);
        return f;
    }
    template <class Element, class Vector>
    static void put(Element* p, Vector v) {
        std::memcpy(p, &v, sizeof v);
    }
    static Flt scaled(Acc acc, int shift, const std::int32_t* correction, float scale) {
        Flt f;
        for (int i = 0; i < 16; ++i) {
            f.lane[i] = static_cast<float>(acc.lane[i] * (1 << shift) - correction[i]) * scale;
        }
        return f;
    }
};

struct FloatOp : Base {
    using Element = float;
    using Acc = Floats;
    using Column = Floats;
    using Row = float;
    static Acc zero() { return Acc{}; }
    static Column load(const std::uint8_t* p) {
        Column c;
        std::memcpy(&c, p, sizeof c);
        return c;
    }
    static Row broadcast(const std::uint8_t* p) {
        float r;
        std::memcpy(&r, p, sizeof r);
        return r;
    }
    static Acc mac(Acc acc, const Column& c, Row r) {
        for (int i = 0; i < 16; ++i) acc.lane[i] += c.lane[i] * r;
        return acc;
    }
    static Acc get(const float* p) {
        Acc a;
        std::memcpy(&a, p, sizeof a);
        return a;
    }
    static void put(float* p, Acc v) { std::memcpy(p, &v, sizeof v); }
};

}  // namespace

const Engine* engine_portable(Codec codec) {
    static const Engine int8{Pack::s16x2, stage_int8_wide, nullptr, scan_piece<IntegerOp, Plain<IntegerOp>>,
                             scan_piece<IntegerOp, Scaled<IntegerOp>>, nullptr, 128, 0, nullptr, nullptr,
                             keep_piece<IntegerOp, Plain<IntegerOp>>,
                             keep_piece<IntegerOp, Scaled<IntegerOp>>, nullptr};
    static const Engine int4{Pack::s16x2, stage_int4_wide, nullptr, scan_piece<IntegerOp, Plain<IntegerOp>>,
                             scan_piece<IntegerOp, Scaled<IntegerOp>>, nullptr, 15, 1, nullptr, nullptr};
    static const Engine bf16{Pack::f32x1, stage_bf16, nullptr, nullptr, nullptr,
                             scan_piece<FloatOp, Plain<FloatOp>>, 0, 0, nullptr, nullptr};
    static const Engine f16{Pack::f32x1, stage_f16, nullptr, nullptr, nullptr,
                            scan_piece<FloatOp, Plain<FloatOp>>, 0, 0, nullptr, nullptr,
                            nullptr, nullptr, keep_piece<FloatOp, Plain<FloatOp>>};
    static const Engine f32{Pack::f32x1, stage_f32, nullptr, nullptr, nullptr,
                            scan_piece<FloatOp, Plain<FloatOp>>, 0, 0, nullptr, nullptr};
    switch (codec) {
        case Codec::int8: return &int8;
        case Codec::int4: return &int4;
        case Codec::bf16: return &bf16;
        case Codec::f16: return &f16;
        case Codec::f32: return &f32;
    }
    return nullptr;
}

// The code of the highest level that has some.
const Engine& engine(Codec codec, [[maybe_unused]] Isa level) {
    const Engine* found = nullptr;
#if defined(PHASEMESH_HAVE_AVX512)
    if (level == Isa::amx_model) found = engine_amx_model(codec);
#if defined(PHASEMESH_HAVE_AMX)
    if (level == Isa::amx) found = engine_amx(codec);
#endif
#if defined(PHASEMESH_HAVE_AVX512BF16)
    if (!found && level >= Isa::avx512) found = engine_avx512bf16(codec);
#endif
    if (!found && level >= Isa::avx512) found = engine_avx512(codec);
#endif
#if defined(PHASEMESH_HAVE_AVXVNNI)
    if (!found && level == Isa::avxvnni) found = engine_avxvnni(codec);
#endif
#if defined(PHASEMESH_HAVE_AVX2)
    if (!found && level >= Isa::avx2) found = engine_avx2(codec);
#endif
#if defined(PHASEMESH_HAVE_DOTPROD)
    if (!found && level == Isa::neon) found = engine_dotprod(codec);
#endif
#if defined(__aarch64__)
    if (!found && level == Isa::neon) found = engine_neon(codec);
#endif
    return found ? *found : *engine_portable(codec);
}

}  // namespace phasemesh::kernels
