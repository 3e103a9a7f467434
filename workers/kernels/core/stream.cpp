// The yardstick of scans: how fast the machine reads memory when it does nothing else.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu.hpp"
#include "scan.hpp"
#include "stream.hpp"

namespace phasemesh::kernels {
namespace {

std::uint64_t read_portable(const std::uint8_t* data, std::size_t bytes) {
    std::uint64_t sum[8] = {};
    std::size_t i = 0;
    for (; i + 64 <= bytes; i += 64) {
        for (int lane = 0; lane < 8; ++lane) {
            std::uint64_t word;
            __builtin_memcpy(&word, data + i + 8 * lane, 8);
            sum[lane] += word;
        }
    }
    std::uint64_t all = 0;
    for (; i < bytes; ++i) all += data[i];
    for (const std::uint64_t lane : sum) all += lane;
    return all;
}

}  // namespace

double stream_read(const void* data, std::size_t bytes, int threads, int repeats, Isa isa, std::uint64_t* sum) {
    if (threads < 1) throw ArgumentError("threads: must be at least 1");
    if (repeats < 1) throw ArgumentError("repeats: must be at least 1");
    // A part is a page at the least.
    const auto most = static_cast<int>(std::clamp<std::size_t>(bytes / 4096, 1, static_cast<std::size_t>(threads)));
    std::vector<StreamReader> readers = {read_portable};
#if defined(PHASEMESH_HAVE_AVX512)
    if (resolve(isa) >= Isa::avx512) readers = {stream_read_avx512, stream_read_avx512_ahead};
#else
    static_cast<void>(isa);
#endif
    const auto* start = static_cast<const std::uint8_t*>(data);
    double best = 1e300;
    std::uint64_t all = 0;
    for (int repeat = 0; repeat < repeats; ++repeat) {
        for (const StreamReader reader : readers) {
            std::vector<std::uint64_t> sums(static_cast<std::size_t>(most));
            std::atomic<int> ready{0};
            std::atomic<int> parts{0};  // how many threads there are; 0 until all of them are
            const auto part = [&](int i) {
                const auto all_parts = static_cast<std::size_t>(parts.load()), mine = static_cast<std::size_t>(i);
                const std::size_t from = bytes / all_parts * mine;
                const std::size_t to = mine + 1 == all_parts ? bytes : bytes / all_parts * (mine + 1);
                sums[mine] = reader(start + from, to - from);
            };
            std::vector<std::thread> others;
            others.reserve(static_cast<std::size_t>(most) - 1);
            for (int i = 1; i < most; ++i) {
                try {
                    others.emplace_back([&, i] {
                        ++ready;
                        while (parts == 0) std::this_thread::yield();
                        part(i);
                    });
                } catch (const std::system_error&) {
                    break;  // the system gives no more threads: those that there are do the work
                }
            }
            const auto given = static_cast<int>(others.size());
            while (ready < given) std::this_thread::yield();
            const auto begin = std::chrono::steady_clock::now();
            parts = given + 1;
            part(0);
            for (std::thread& other : others) other.join();
            const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
            best = std::min(best, took.count());
            for (const std::uint64_t part_sum : sums) all += part_sum;
        }
    }
    if (sum) *sum = all;
    return best;
}

}  // namespace phasemesh::kernels
