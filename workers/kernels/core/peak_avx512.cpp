#if defined(__x86_64__) && defined(__AVX512VNNI__)
#include "peak.hpp"

namespace phasemesh::kernels {

std::uint64_t multiply_avx512(std::uint64_t rounds) {
    for (std::uint64_t i = 0; i < rounds; ++i) {
        __asm__ volatile(
            "vpdpbusd %%zmm31, %%zmm30, %%zmm0\n"
            "vpdpbusd %%zmm31, %%zmm30, %%zmm1\n"
            "vpdpbusd %%zmm31, %%zmm30, %%zmm2\n"
            "vpdpbusd %%zmm31, %%zmm30, %%zmm3\n"
            "vpdpbusd %%zmm31, %%zmm30, %%zmm4\n"
            "vpdpbusd %%zmm31, %%zmm30, %%zmm5\n"
            "vpdpbusd %%zmm31, %%zmm30, %%zmm6\n"
            "vpdpbusd %%zmm31, %%zmm30, %%zmm7\n"
            "vpdpbusd %%zmm31, %%zmm30, %%zmm8\n"
            "vpdpbusd %%zmm31, %%zmm30, %%zmm9\n"
            "vpdpbusd %%zmm31, %%zmm30, %%zmm10\n"
            "vpdpbusd %%zmm31, %%zmm30, %%zmm11\n"
            "vpdpbusd %%zmm31, %%zmm30, %%zmm12\n"
            "vpdpbusd %%zmm31, %%zmm30, %%zmm13\n"
            "vpdpbusd %%zmm31, %%zmm30, %%zmm14\n"
            "vpdpbusd %%zmm31, %%zmm30, %%zmm15\n"
            :
            :
            : "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10", "zmm11", "zmm12", "zmm13", "zmm14", "zmm15");
    }
    return rounds * 16 * 64;
}

}  // namespace phasemesh::kernels
#endif
