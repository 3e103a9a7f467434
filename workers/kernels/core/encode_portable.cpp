#include "encode_block.hpp"

namespace phasemesh::kernels {

void encode_portable(const EncodeRun& run) { encode_run(run); }

}  // namespace phasemesh::kernels
