#if defined(__x86_64__) && defined(__AVX512F__)
#include "encode_block.hpp"

namespace phasemesh::kernels {

void encode_avx512(const EncodeRun& run) { encode_run(run); }

}  // namespace phasemesh::kernels
#endif
