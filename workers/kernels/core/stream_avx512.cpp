#if defined(__x86_64__) && defined(__AVX512F__)
#include "stream.hpp"

#include <immintrin.h>

namespace phasemesh::kernels {
namespace {

template <bool Ahead>
inline __attribute__((always_inline)) std::uint64_t read(const std::uint8_t* data, std::size_t bytes) {
    __m512i sum[8];
    for (__m512i& lane : sum) lane = _mm512_setzero_si512();
    std::size_t i = 0;
    for (; i + 512 <= bytes; i += 512) {
        for (int lane = 0; lane < 8; ++lane) {
            if constexpr (Ahead) __builtin_prefetch(data + i + 64 * lane + 8192, 0, 3);
            sum[lane] = _mm512_add_epi64(sum[lane], _mm512_loadu_si512(data + i + 64 * lane));
        }
    }
    std::uint64_t all = 0;
    for (; i < bytes; ++i) all += data[i];
    for (const __m512i& lane : sum) {
        std::uint64_t part[8];
        _mm512_storeu_si512(part, lane);
        for (const std::uint64_t word : part) all += word;  // wraps, which signed sums mustn't
    }
    return all;
}

}  // namespace

std::uint64_t stream_read_avx512(const std::uint8_t* data, std::size_t bytes) { return read<false>(data, bytes); }
std::uint64_t stream_read_avx512_ahead(const std::uint8_t* data, std::size_t bytes) {
    return read<true>(data, bytes);
}

}  // namespace phasemesh::kernels
#endif
