#include "peak.hpp"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu.hpp"

namespace phasemesh::kernels {

double multiply_rate(int threads, int repeats, Isa isa) {
    if (threads < 1) throw ArgumentError("threads: must be at least 1");
    if (repeats < 1) throw ArgumentError("repeats: must be at least 1");
    Multiplier multiply = nullptr;
    std::uint64_t rounds = 0;
    [[maybe_unused]] const Isa level = resolve(isa);
#if defined(PHASEMESH_HAVE_AVX512)
    if (level == Isa::avx512 || level == Isa::amx) {
        multiply = multiply_avx512;
        rounds = 2'000'000;
    }
#endif
#if defined(PHASEMESH_HAVE_AMX)
    if (level == Isa::amx && features().amx_int8) {
        multiply = multiply_amx;
        rounds = 1'000'000;
    }
#endif
    if (!multiply) return 0.0;
    threads = std::min(threads, 1024);
    double best = 0.0;
    for (int repeat = 0; repeat < repeats; ++repeat) {
        std::vector<std::uint64_t> done(static_cast<std::size_t>(threads));
        const auto begin = std::chrono::steady_clock::now();
        std::vector<std::thread> others;
        for (std::size_t i = 1; i < done.size(); ++i) {
            try {
                others.emplace_back([&, i] { done[i] = multiply(rounds); });
            } catch (const std::system_error&) {
                break;  // the system gives no more threads
            }
        }
        done[0] = multiply(rounds);
        for (std::thread& other : others) other.join();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        std::uint64_t all = 0;
        for (const std::uint64_t one : done) all += one;
        best = std::max(best, static_cast<double>(all) / took.count());
    }
    return best;
}

}  // namespace phasemesh::kernels
