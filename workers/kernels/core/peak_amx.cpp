#if defined(__x86_64__) && defined(__AMX_TILE__) && defined(__AMX_INT8__)
#include <immintrin.h>

#include "peak.hpp"

namespace phasemesh::kernels {

std::uint64_t multiply_amx(std::uint64_t rounds) {
    // Palette 1, eight tiles of 16 rows of 64 bytes.
    alignas(64) std::uint8_t config[64] = {1};
    for (int tile = 0; tile < 8; ++tile) {
        config[16 + 2 * tile] = 64;
        config[48 + tile] = 16;
    }
    __asm__ volatile("" : : "r"(config) : "memory");
    _tile_loadconfig(config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (std::uint64_t i = 0; i < rounds; ++i) {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
    _tile_release();
    return rounds * 4 * 16 * 16 * 64;
}

}  // namespace phasemesh::kernels
#endif
