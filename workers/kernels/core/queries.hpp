// Queries in the form that kernels read, and the aligned memory that holds it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "micro.hpp"
#include "scan.hpp"

namespace phasemesh::kernels {

// Memory aligned to a cache line, which is also a vector register and a tile row.
class Aligned {
   public:
    explicit Aligned(std::size_t bytes = 0) : bytes_(bytes) {
        if (bytes == 0) return;
        const std::size_t rounded = (bytes + 63) / 64 * 64;
        data_.reset(static_cast<std::uint8_t*>(std::aligned_alloc(64, rounded)));
        if (!data_) throw std::bad_alloc();
    }
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data_.get());
    }
    std::size_t size() const { return bytes_; }

   private:
    struct Free {
        void operator()(std::uint8_t* p) const { std::free(p); }
    };
    std::size_t bytes_;
    std::unique_ptr<std::uint8_t, Free> data_;
};

class PreparedQueries {
   public:
    std::size_t dim = 0;
    Codec codec = Codec::int8;
    std::uint64_t seed = 0;
    bool scaled = false;
    // Largest magnitude of a document's element (float codecs) with which no sum of products overflows: then every
    // instruction set gives the same, or the same error.
    float largest = 3.402823466e38f;
    Isa level = Isa::portable;
    Panel panel;                          // into `memory`
    std::vector<std::size_t> starts;      // [queries + 1]: query q owns columns starts[q]..starts[q + 1]
    std::vector<double> factors;          // [queries]: score = sum of maxima * factor
    std::vector<std::int64_t> zero_sums;  // [queries]: what to take off the integer sum first
    std::vector<std::int32_t> corrections;
    Aligned memory;

    std::size_t count() const { return factors.size(); }
    std::size_t columns() const { return starts.back(); }
};

}  // namespace phasemesh::kernels
