// The tile instructions in plain C++, after Intel's Software Developer's Manual (TILELOADD, TILESTORED, TDPBUSD,
// TDPBF16PS): rows and bytes of a tile come from the configuration, and what a load doesn't fill is zero.
#pragma once

#include <cstdint>
#include <cstring>

namespace phasemesh::kernels {
namespace {

struct TileModel {
    struct Tile {
        std::uint8_t row[16][64];
    };
    Tile tile[8];
    std::uint16_t row_bytes[8];
    std::uint8_t rows[8];

    void configure(const void* config) {
        const auto* bytes = static_cast<const std::uint8_t*>(config);
        std::memcpy(row_bytes, bytes + 16, sizeof row_bytes);
        std::memcpy(rows, bytes + 48, sizeof rows);
        std::memset(tile, 0, sizeof tile);
    }
    void release() {
        std::memset(row_bytes, 0, sizeof row_bytes);
        std::memset(rows, 0, sizeof rows);
    }
    void zero(int n) { std::memset(&tile[n], 0, sizeof tile[n]); }
    void load(int n, const void* from, std::size_t stride) {
        zero(n);
        for (int r = 0; r < rows[n]; ++r) {
            std::memcpy(tile[n].row[r], static_cast<const std::uint8_t*>(from) + r * stride, row_bytes[n]);
        }
    }
    void store(int n, void* to, std::size_t stride) const {
        for (int r = 0; r < rows[n]; ++r) {
            std::memcpy(static_cast<std::uint8_t*>(to) + r * stride, tile[n].row[r], row_bytes[n]);
        }
    }
    void dot_int(int c, int a, int b) {
        for (int m = 0; m < rows[c]; ++m) {
            for (int k = 0; k < row_bytes[a] / 4; ++k) {
                for (int n = 0; n < row_bytes[c] / 4; ++n) {
                    std::int32_t sum;
                    std::memcpy(&sum, &tile[c].row[m][4 * n], 4);
                    for (int i = 0; i < 4; ++i) {
                        sum += static_cast<std::int32_t>(tile[a].row[m][4 * k + i]) *
                               static_cast<std::int8_t>(tile[b].row[k][4 * n + i]);
                    }
                    std::memcpy(&tile[c].row[m][4 * n], &sum, 4);
                }
            }
        }
    }
    static float widen(const std::uint8_t* half) {
        std::uint16_t bits;
        std::memcpy(&bits, half, 2);
        const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, 4);
        return value;
    }
    void dot_bf16(int c, int a, int b) {
        for (int m = 0; m < rows[c]; ++m) {
            for (int k = 0; k < row_bytes[a] / 4; ++k) {
                for (int n = 0; n < row_bytes[c] / 4; ++n) {
                    float sum;
                    std::memcpy(&sum, &tile[c].row[m][4 * n], 4);
                    for (int i = 0; i < 2; ++i) {
                        sum += widen(&tile[a].row[m][4 * k + 2 * i]) * widen(&tile[b].row[k][4 * n + 2 * i]);
                    }
                    std::memcpy(&tile[c].row[m][4 * n], &sum, 4);
                }
            }
        }
    }
};

thread_local TileModel tiles;

}  // namespace
}  // namespace phasemesh::kernels
