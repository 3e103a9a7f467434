// What this machine can run, found at run time: one binary serves every CPU.
#pragma once

#include <string>
#include <vector>

#include "types.hpp"

namespace phasemesh::kernels {

// The highest level of this machine, and of the operating system's permission (AMX is asked for here).
Isa detect();

// The level that work asked for at most `limit` gets here. Throws ArgumentError "isa: ..." for amx_model
// without AVX-512, nothing else: a limit above the machine is the machine's level.
Isa resolve(Isa limit);

// Levels that run here, lowest first (amx_model left out).
std::vector<Isa> available();

// "portable", "neon", "avx2", "avxvnni", "avx512", "amx", "amx-model"; parse throws ArgumentError "isa: ...".
const char* name(Isa isa);
Isa parse(const std::string& text);

// The code that scans a codec at a level: "amx-int8", "amx-bf16", "avx512-vnni", "avx512-bf16", "avx512",
// "avx-vnni", "avx2", "neon-dotprod", "neon", "portable".
const char* path(Codec codec, Isa level);

struct Features {
    bool avx2 = false, fma = false, f16c = false, avxvnni = false;
    bool avx512 = false;  // F, BW, DQ, VL and VNNI
    bool avx512_bf16 = false;
    bool amx_int8 = false, amx_bf16 = false;
    bool neon = false, dotprod = false;
};
const Features& features();

}  // namespace phasemesh::kernels
