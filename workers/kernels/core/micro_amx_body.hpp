// The AMX kernel. Included once over the real tile instructions (micro_amx.cpp) and once over a model of them in
// plain C++ (micro_amx_model_avx512.cpp), so that its arithmetic is tested on any machine with AVX-512. The including
// file defines
//   TILE_FENCE() TILE_CONFIGURE(p) TILE_RELEASE() TILE_ZERO(n) TILE_LOAD(n, p, stride) TILE_STORE(n, p, stride)
//   TILE_DOT_INT(c, a, b) TILE_DOT_BF16(c, a, b)         with literal tile numbers
//
// A tile of tokens is 16 rows of the codes where they lie (no copy, no repacking), a tile of columns 16 columns
// of the panel. Blocks of 32 tokens by 32 columns keep four tiles of sums busy, which hides the latency of the
// multiplier. The sums of one block are reduced by AVX-512 while the tile unit works on the next.
#include <utility>

#include "micro_avx512.hpp"

namespace phasemesh::kernels {
namespace {

constexpr int kTileRows = 16;
constexpr std::size_t kTileBytes = 64;
constexpr std::size_t kAhead = 8192;  // bytes; a piece's worth of DRAM latency at full speed

// Rows are cut into equal slices of at most 64 bytes, whole 4-byte steps each, so that one tile shape fits all.
inline std::size_t slices_of(std::size_t row_bytes) {
    std::size_t slices = (row_bytes + kTileBytes - 1) / kTileBytes;
    while ((row_bytes / 4) % slices) ++slices;
    return slices;
}

struct TileConfig {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Tiles 0..3: sums of tokens 0..15 and 16..31 with two groups of columns; 4, 5: tokens; 6, 7: columns.
void enter(std::size_t row_bytes) {
    const std::size_t slice = row_bytes / slices_of(row_bytes);
    alignas(64) TileConfig config;
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = i < 6 ? kTileRows : static_cast<std::uint8_t>(slice / 4);
        config.row_bytes[i] = i == 4 || i == 5 ? static_cast<std::uint16_t>(slice) : kTileBytes;
    }
    TILE_CONFIGURE(&config);
}

void leave() { TILE_RELEASE(); }

// 16 rows to load, of which `low` to `high` count: token of row r = first + r.
struct TokenTile {
    const std::uint8_t* rows;
    int low, high;
    std::int64_t first;
};

TokenTile token_tile(const Piece& piece, std::int64_t token, std::size_t row_bytes, std::uint8_t* spare) {
    const auto valid = static_cast<int>(std::min<std::int64_t>(kTileRows, piece.tokens - token));
    const int missing = kTileRows - valid;
    const std::uint8_t* rows = piece.rows + static_cast<std::size_t>(token) * row_bytes;
    if (missing <= piece.after) return {rows, 0, valid, token};
    if (missing <= piece.before + token) {
        return {rows - static_cast<std::size_t>(missing) * row_bytes, missing, kTileRows, token - missing};
    }
    std::memcpy(spare, rows, static_cast<std::size_t>(valid) * row_bytes);
    return {spare, 0, valid, token};
}

template <bool Bf16>
struct TileOp : Wide512 {
    using Element = std::conditional_t<Bf16, float, std::int32_t>;
    using Acc = std::conditional_t<Bf16, __m512, __m512i>;
};

// tokens a (and b) times the columns at c0 (and c1), into tiles 0..3.
template <bool Bf16, bool TwoTiles, bool TwoGroups>
inline __attribute__((always_inline)) void multiply(const std::uint8_t* a, const std::uint8_t* b,
                                                    std::size_t row_bytes, std::size_t slices,
                                                    const std::uint8_t* c0, const std::uint8_t* c1) {
    const std::size_t slice = row_bytes / slices;
    TILE_FENCE();
    TILE_ZERO(0);
    if constexpr (TwoGroups) TILE_ZERO(1);
    if constexpr (TwoTiles) TILE_ZERO(2);
    if constexpr (TwoTiles && TwoGroups) TILE_ZERO(3);
    for (std::size_t s = 0; s < slices; ++s) {
        TILE_LOAD(4, a + s * slice, row_bytes);
        TILE_LOAD(6, c0 + s * slice * kGroup, kTileBytes);
        if constexpr (Bf16) {
            TILE_DOT_BF16(0, 4, 6);
        } else {
            TILE_DOT_INT(0, 4, 6);
        }
        if constexpr (TwoGroups) {
            TILE_LOAD(7, c1 + s * slice * kGroup, kTileBytes);
            if constexpr (Bf16) {
                TILE_DOT_BF16(1, 4, 7);
            } else {
                TILE_DOT_INT(1, 4, 7);
            }
        }
        if constexpr (TwoTiles) {
            TILE_LOAD(5, b + s * slice, row_bytes);
            if constexpr (Bf16) {
                TILE_DOT_BF16(2, 5, 6);
            } else {
                TILE_DOT_INT(2, 5, 6);
            }
        }
        if constexpr (TwoTiles && TwoGroups) {
            if constexpr (Bf16) {
                TILE_DOT_BF16(3, 5, 7);
            } else {
                TILE_DOT_INT(3, 5, 7);
            }
        }
    }
}

struct Block {
    TokenTile tile[2];
    int tiles = 0;
};

// Sums of a block, [tile * 2 + group][row][column], to maxima.
template <class Way, bool At>
void reduce(const Panel& panel, std::size_t group, int groups, const Piece& piece, const Block& block,
            const typename Way::SumElement* sums, typename Way::Element* best, std::int32_t* best_at) {
    for (int g = 0; g < groups; ++g) {
        const std::size_t column = (group + static_cast<std::size_t>(g)) * kGroup;
        auto b = Way::get(best + column);
        auto at = Wide512::At{};
        if constexpr (At) at = Wide512::get_at(best_at + column);
        for (int i = 0; i < block.tiles; ++i) {
            const TokenTile& tile = block.tile[i];
            const auto* rows = sums + (2 * i + g) * kTileRows * static_cast<int>(kGroup);
            for (int r = tile.low; r < tile.high; ++r) {
                const auto v = Way::value(panel, column, Wide512::get(rows + r * static_cast<int>(kGroup)), piece,
                                          tile.first + r);
                if constexpr (At) {
                    Way::raise_at(b, at, v, piece.first + static_cast<std::int32_t>(tile.first + r));
                } else {
                    b = Way::raise(b, v);
                }
            }
        }
        Way::put(best + column, b);
        if constexpr (At) Wide512::put_at(best_at + column, at);
    }
}

template <class Base, class Sum>
struct WithSums : Base {
    using SumElement = Sum;
};

template <class Way, bool Bf16, bool TwoGroups, bool At>
void columns_of_tiles(const Panel& panel, std::size_t group, const Piece& piece, typename Way::Element* best,
                      std::int32_t* best_at, std::uint8_t* spare) {
    using Sum = typename Way::SumElement;
    constexpr std::size_t kTile = kTileRows * kGroup;
    constexpr int groups = TwoGroups ? 2 : 1;
    alignas(64) Sum sums[2][4 * kTile];
    const std::size_t row_bytes = 4 * panel.steps;
    const std::size_t slices = slices_of(row_bytes);
    const std::uint8_t* c0 = panel.data + group * panel.steps * 64;
    const std::uint8_t* c1 = c0 + (TwoGroups ? panel.steps * 64 : 0);
    Block blocks[2];
    int turn = 0;
    bool pending = false;
    for (std::int64_t token = 0; token < piece.tokens; token += 2 * kTileRows, turn ^= 1) {
        Block& block = blocks[turn];
        block.tile[0] = token_tile(piece, token, row_bytes, spare);
        block.tiles = 1;
        if (token + kTileRows < piece.tokens) {
            block.tile[1] = token_tile(piece, token + kTileRows, row_bytes, spare);
            block.tiles = 2;
        }
        if (group == 0) {
            const std::uint8_t* ahead = block.tile[0].rows + kAhead;
            for (std::size_t byte = 0; byte < 2 * kTileRows * row_bytes; byte += 64) {
                __builtin_prefetch(ahead + byte, 0, 3);
            }
        }
        if (block.tiles == 2) {
            multiply<Bf16, true, TwoGroups>(block.tile[0].rows, block.tile[1].rows, row_bytes, slices, c0, c1);
        } else {
            multiply<Bf16, false, TwoGroups>(block.tile[0].rows, nullptr, row_bytes, slices, c0, c1);
        }
        if (pending) {
            reduce<Way, At>(panel, group, groups, piece, blocks[turn ^ 1], sums[turn ^ 1], best, best_at);
        }
        Sum* to = sums[turn];
        TILE_STORE(0, to, kTileBytes);
        if constexpr (TwoGroups) TILE_STORE(1, to + kTile, kTileBytes);
        if (block.tiles == 2) {
            TILE_STORE(2, to + 2 * kTile, kTileBytes);
            if constexpr (TwoGroups) TILE_STORE(3, to + 3 * kTile, kTileBytes);
        }
        pending = true;
    }
    reduce<Way, At>(panel, group, groups, piece, blocks[turn ^ 1], sums[turn ^ 1], best, best_at);
}

template <class Way, bool Bf16>
void scan_tiles(const Panel& panel, const Piece& piece, typename Way::Element* best, std::int32_t* best_at) {
    alignas(64) std::uint8_t spare[kTileRows * kMaxDim * (Bf16 ? 2 : 1)];
    std::size_t group = 0;
    for (; group + 2 <= panel.groups; group += 2) {
        if (best_at) {
            columns_of_tiles<Way, Bf16, true, true>(panel, group, piece, best, best_at, spare);
        } else {
            columns_of_tiles<Way, Bf16, true, false>(panel, group, piece, best, best_at, spare);
        }
    }
    if (group < panel.groups) {
        if (best_at) {
            columns_of_tiles<Way, Bf16, false, true>(panel, group, piece, best, best_at, spare);
        } else {
            columns_of_tiles<Way, Bf16, false, false>(panel, group, piece, best, best_at, spare);
        }
    }
}

using PlainInteger = WithSums<Plain<TileOp<false>>, std::int32_t>;
using ScaledInteger = WithSums<Scaled<TileOp<false>>, std::int32_t>;
using PlainFloat = WithSums<Plain<TileOp<true>>, float>;

const Engine* tile_engine(Codec codec, bool integer, bool bf16) {
    static const Engine of_int8{Pack::s8x4, nullptr, nullptr, scan_tiles<PlainInteger, false>,
                                scan_tiles<ScaledInteger, false>, nullptr, 128, 0, enter, leave};
    static const Engine of_int4{Pack::s8x4, stage_int4_512, nullptr, scan_tiles<PlainInteger, false>,
                                scan_tiles<ScaledInteger, false>, nullptr, 15, 1, enter, leave};
    static const Engine of_bf16{Pack::bf16x2, nullptr, largest_bf16, nullptr, nullptr,
                                scan_tiles<PlainFloat, true>, 0, 0, enter, leave};
    if (integer && codec == Codec::int8) return &of_int8;
    if (integer && codec == Codec::int4) return &of_int4;
    return bf16 && codec == Codec::bf16 ? &of_bf16 : nullptr;
}

}  // namespace
}  // namespace phasemesh::kernels
