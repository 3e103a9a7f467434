// AMX: 16 x 16 x 64 bytes of products per instruction.
#if defined(__x86_64__) && defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#include <immintrin.h>

// Some compilers' tile intrinsics don't say that they read and write memory.
#define TILE_FENCE() __asm__ volatile("" ::: "memory")
#define TILE_CONFIGURE(p) \
    do {                  \
        TILE_FENCE();     \
        _tile_loadconfig(p); \
    } while (false)
#define TILE_RELEASE() _tile_release()
#define TILE_ZERO(n) _tile_zero(n)
#define TILE_LOAD(n, p, stride) _tile_loadd(n, p, stride)
#define TILE_STORE(n, p, stride) \
    do {                         \
        _tile_stored(n, p, stride); \
        TILE_FENCE();            \
    } while (false)
#define TILE_DOT_INT(c, a, b) _tile_dpbusd(c, a, b)
#define TILE_DOT_BF16(c, a, b) _tile_dpbf16ps(c, a, b)

#include "cpu.hpp"
#include "micro_amx_body.hpp"

namespace phasemesh::kernels {

const Engine* engine_amx(Codec codec) {
    return tile_engine(codec, features().amx_int8, features().amx_bf16);
}

}  // namespace phasemesh::kernels
#endif
