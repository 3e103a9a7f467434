#include "cpu.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace phasemesh::kernels {
namespace {

#if defined(__x86_64__)
bool bit(unsigned word, int position) { return (word >> position) & 1u; }

unsigned long long enabled_state() {
    unsigned low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<unsigned long long>(high) << 32) | low;
}

// Linux hands the 8 KiB of tile registers to a process that asks for them (arch/x86 documentation, "Using XSTATE
// features in user space applications").
bool may_use_tiles() {
#if defined(__linux__)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
#endif

Features find() {
    Features found;
#if defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27) || !bit(c, 28)) return found;
    const bool fma = bit(c, 12), f16c = bit(c, 29);
    const auto state = enabled_state();
    if ((state & 0x6) != 0x6) return found;
    unsigned leaves = 0;
    if (!__get_cpuid_count(7, 0, &leaves, &b, &c, &d)) return found;
    found.fma = fma;
    found.f16c = f16c;
    found.avx2 = bit(b, 5);
    const bool wide = (state & 0xe0) == 0xe0;
    const bool tiles = (state & 0x60000) == 0x60000 && bit(d, 24);
    found.avx512 = wide && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31) && bit(c, 11);
    const bool tile_int8 = bit(d, 25), tile_bf16 = bit(d, 22);
    if (leaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
        found.avxvnni = found.avx2 && bit(a, 4);
        found.avx512_bf16 = found.avx512 && bit(a, 5);
    }
    if (found.avx512 && tiles && (tile_int8 || tile_bf16) && may_use_tiles()) {
        found.amx_int8 = tile_int8;
        found.amx_bf16 = tile_bf16;
    }
#if !defined(PHASEMESH_HAVE_AVXVNNI)
    found.avxvnni = false;
#endif
#if !defined(PHASEMESH_HAVE_AVX512)
    found.avx512 = found.avx512_bf16 = found.amx_int8 = found.amx_bf16 = false;
#endif
#if !defined(PHASEMESH_HAVE_AVX512BF16)
    found.avx512_bf16 = false;
#endif
#if !defined(PHASEMESH_HAVE_AMX)
    found.amx_int8 = found.amx_bf16 = false;
#endif
#elif defined(__aarch64__)
    found.neon = true;
#if defined(__linux__)
    found.dotprod = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__APPLE__)
    found.dotprod = true;  // every Apple processor that runs macOS has it
#endif
#if !defined(PHASEMESH_HAVE_DOTPROD)
    found.dotprod = false;
#endif
#endif
    return found;
}

bool offers(const Features& f, Isa isa) {
    switch (isa) {
        case Isa::portable: return true;
        case Isa::neon: return f.neon;
        case Isa::avx2: return f.avx2 && f.fma && f.f16c;
        case Isa::avxvnni: return f.avxvnni && f.fma && f.f16c;
        case Isa::avx512: return f.avx512 && f.fma && f.f16c;
        case Isa::amx: return f.amx_int8 || f.amx_bf16;
        case Isa::amx_model: return f.avx512 && f.fma && f.f16c;
    }
    return false;
}

constexpr Isa kLevels[] = {Isa::portable, Isa::neon, Isa::avx2, Isa::avxvnni, Isa::avx512, Isa::amx};
constexpr const char* kNames[] = {"portable", "neon", "avx2", "avxvnni", "avx512", "amx", "amx-model"};

}  // namespace

const Features& features() {
    static const Features found = find();
    return found;
}

Isa detect() { return resolve(Isa::amx); }

Isa resolve(Isa limit) {
    if (limit == Isa::amx_model) {
        if (!offers(features(), limit)) {
            throw ArgumentError("isa: amx-model needs a processor with AVX-512 (F, BW, DQ, VL, VNNI)");
        }
        return limit;
    }
    Isa level = Isa::portable;
    for (const Isa isa : kLevels) {
        if (isa <= limit && offers(features(), isa)) level = isa;
    }
    return level;
}

std::vector<Isa> available() {
    std::vector<Isa> levels;
    for (const Isa isa : kLevels) {
        if (offers(features(), isa)) levels.push_back(isa);
    }
    return levels;
}

const char* name(Isa isa) { return kNames[static_cast<int>(isa)]; }

Isa parse(const std::string& text) {
    std::string known;
    for (std::size_t i = 0; i < sizeof kNames / sizeof *kNames; ++i) {
        if (text == kNames[i]) return static_cast<Isa>(i);
        known += (i ? ", " : "") + std::string(kNames[i]);
    }
    throw ArgumentError("isa: \"" + text + "\" is none of " + known);
}

const char* path(Codec codec, Isa level) {
    const Features& f = features();
    if (level == Isa::amx_model) {
        if (is_integer(codec)) return "amx-int8-model";
        if (codec == Codec::bf16) return "amx-bf16-model";
    }
    if (level == Isa::amx) {
        if (is_integer(codec) && f.amx_int8) return "amx-int8";
        if (codec == Codec::bf16 && f.amx_bf16) return "amx-bf16";
    }
    if (level >= Isa::avx512) {
        if (is_integer(codec)) return "avx512-vnni";
        if (codec == Codec::bf16 && f.avx512_bf16) return "avx512-bf16";
        return "avx512";
    }
    if (level == Isa::avxvnni && is_integer(codec)) return "avx-vnni";
    if (level >= Isa::avx2) return "avx2";
    if (level == Isa::neon && is_integer(codec) && f.dotprod) return "neon-dotprod";
    if (level == Isa::neon && !is_integer(codec)) return "neon";
    return "portable";
}

}  // namespace phasemesh::kernels
