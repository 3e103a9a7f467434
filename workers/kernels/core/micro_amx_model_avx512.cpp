// The AMX kernel over a model of the tile instructions: slow, for tests alone.
#if defined(__x86_64__) && defined(__AVX512F__)
#include "tile_model.hpp"

#define TILE_FENCE() static_cast<void>(0)
#define TILE_CONFIGURE(p) tiles.configure(p)
#define TILE_RELEASE() tiles.release()
#define TILE_ZERO(n) tiles.zero(n)
#define TILE_LOAD(n, p, stride) tiles.load(n, p, stride)
#define TILE_STORE(n, p, stride) tiles.store(n, p, stride)
#define TILE_DOT_INT(c, a, b) tiles.dot_int(c, a, b)
#define TILE_DOT_BF16(c, a, b) tiles.dot_bf16(c, a, b)

#include "micro_amx_body.hpp"

namespace phasemesh::kernels {

const Engine* engine_amx_model(Codec codec) { return tile_engine(codec, true, true); }

}  // namespace phasemesh::kernels
#endif
