// What the C++ tests share: checks that count, numbers that repeat, and memory that ends where it says.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cpu.hpp"

namespace check {

inline int failures = 0;
inline std::string place;  // what is being tested, for messages

inline void fail(const char* file, int line, const std::string& what) {
    if (++failures <= 20) std::fprintf(stderr, "%s:%d: [%s] %s\n", file, line, place.c_str(), what.c_str());
}

inline int finish(const char* name) {
    std::fprintf(stderr, "%s: %s (%d failures)\n", name, failures ? "FAILED" : "passed", failures);
    return failures ? 1 : 0;
}

// splitmix64: the same numbers everywhere.
class Random {
   public:
    explicit Random(std::uint64_t seed) : state_(seed) {}
    std::uint64_t next() {
        std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    std::uint64_t below(std::uint64_t n) { return next() % n; }
    // Roughly normal, never far out.
    float normal() {
        double sum = 0.0;
        for (int i = 0; i < 4; ++i) sum += static_cast<double>(next() >> 11) * 0x1p-53 - 0.5;
        return static_cast<float>(sum * 1.7);
    }

   private:
    std::uint64_t state_;
};

// Bytes between two pages that cannot be touched: the array begins right after the first (`at_start`) or ends right
// before the second.
class Fenced {
   public:
    Fenced(const void* from, std::size_t bytes, bool at_start) {
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        const std::size_t inner = (bytes + page - 1) / page * page + (bytes == 0 ? page : 0);
        size_ = inner + 2 * page;
        void* const map = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (map == MAP_FAILED) std::abort();
        base_ = static_cast<std::uint8_t*>(map);
        data_ = at_start ? base_ + page : base_ + page + inner - bytes;
        if (bytes) std::memcpy(data_, from, bytes);
        if (mprotect(base_, page, PROT_NONE) || mprotect(base_ + page + inner, page, PROT_NONE)) std::abort();
        if (mprotect(base_ + page, inner, PROT_READ)) std::abort();
    }
    template <class T>
    Fenced(const std::vector<T>& from, bool at_start) : Fenced(from.data(), from.size() * sizeof(T), at_start) {}
    ~Fenced() { munmap(base_, size_); }
    Fenced(const Fenced&) = delete;
    Fenced& operator=(const Fenced&) = delete;
    const std::uint8_t* bytes() const { return data_; }
    template <class T>
    const T* as() const {
        return reinterpret_cast<const T*>(data_);
    }

   private:
    std::uint8_t* base_ = nullptr;
    std::uint8_t* data_ = nullptr;
    std::size_t size_ = 0;
};

// Every level that runs here, and the model of the tile instructions where it does.
inline std::vector<phasemesh::kernels::Isa> levels() {
    using phasemesh::kernels::Isa;
    auto all = phasemesh::kernels::available();
    try {
        all.push_back(phasemesh::kernels::resolve(Isa::amx_model));
    } catch (const phasemesh::kernels::ArgumentError&) {
        std::fprintf(stderr, "the AMX model needs AVX-512: left out\n");
    }
    return all;
}

}  // namespace check

#define CHECK(condition)                                            \
    do {                                                            \
        if (!(condition)) check::fail(__FILE__, __LINE__, #condition); \
    } while (0)

#define CHECK_THAT(condition, what)                                                                \
    do {                                                                                           \
        if (!(condition)) check::fail(__FILE__, __LINE__, std::string(#condition ": ") + (what)); \
    } while (0)

// `expression` throws an Error whose text begins with `start`.
#define CHECK_THROWS(expression, Error, start)                                                            \
    do {                                                                                                  \
        try {                                                                                             \
            expression;                                                                                   \
            check::fail(__FILE__, __LINE__, #expression " throws nothing");                                \
        } catch (const Error& error) {                                                                    \
            if (std::string(error.what()).rfind(start, 0) != 0) {                                          \
                check::fail(__FILE__, __LINE__, #expression " throws \"" + std::string(error.what()) + "\""); \
            }                                                                                             \
        }                                                                                                 \
    } while (0)
