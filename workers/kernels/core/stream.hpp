// Readers that add up memory, nothing else.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phasemesh::kernels {

using StreamReader = std::uint64_t (*)(const std::uint8_t* data, std::size_t bytes);

std::uint64_t stream_read_avx512(const std::uint8_t* data, std::size_t bytes);
// With software prefetch, which some machines need to reach their best.
std::uint64_t stream_read_avx512_ahead(const std::uint8_t* data, std::size_t bytes);

}  // namespace phasemesh::kernels
