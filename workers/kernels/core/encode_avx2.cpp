#if defined(__x86_64__) && defined(__AVX2__)
#include "encode_block.hpp"

namespace phasemesh::kernels {

void encode_avx2(const EncodeRun& run) { encode_run(run); }

}  // namespace phasemesh::kernels
#endif
