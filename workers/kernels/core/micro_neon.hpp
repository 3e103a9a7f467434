// What the aarch64 files share; see micro_impl.hpp.
#pragma once

#include <arm_neon.h>

#include "micro_impl.hpp"

namespace phasemesh::kernels {
namespace {

struct Wide128 {
    using Flt = float32x4_t;
    using At = int32x4_t;
    static constexpr int kLanes = 4;
    // 4 tokens by one group of four vectors: 16 sums, 4 columns and a token in 32 registers.
    static constexpr int kTokens = 4, kGroups = 1;
    static constexpr int kPrefetch = 0;

    static int32x4_t get(const std::int32_t* p) { return vld1q_s32(p); }
    static float32x4_t get(const float* p) { return vld1q_f32(p); }
    static void put(std::int32_t* p, int32x4_t v) { vst1q_s32(p, v); }
    static void put(float* p, float32x4_t v) { vst1q_f32(p, v); }
    static At get_at(const std::int32_t* p) { return vld1q_s32(p); }
    static void put_at(std::int32_t* p, At at) { vst1q_s32(p, at); }
    static int32x4_t raise(int32x4_t best, int32x4_t v) { return vmaxq_s32(best, v); }
    static float32x4_t raise(float32x4_t best, float32x4_t v) { return vmaxq_f32(best, v); }
    static void raise_at(int32x4_t& best, At& at, int32x4_t v, std::int32_t position) {
        const uint32x4_t above = vcgtq_s32(v, best);
        best = vbslq_s32(above, v, best);
        at = vbslq_s32(above, vdupq_n_s32(position), at);
    }
    static void raise_at(float32x4_t& best, At& at, float32x4_t v, std::int32_t position) {
        const uint32x4_t above = vcgtq_f32(v, best);
        best = vbslq_f32(above, v, best);
        at = vbslq_s32(above, vdupq_n_s32(position), at);
    }
    static float32x4_t scaled(int32x4_t acc, int shift, const std::int32_t* correction, float scale) {
        const int32x4_t v = vsubq_s32(vshlq_s32(acc, vdupq_n_s32(shift)), vld1q_s32(correction));
        return vmulq_n_f32(vcvtq_f32_s32(v), scale);
    }
};

}  // namespace
}  // namespace phasemesh::kernels
