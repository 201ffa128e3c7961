// Layers of models as Python hands them over: weights by reference, which stay where they are and may change there.
#pragma once

#include <memory>
#include <optional>
#include <type_traits>

#include "arrays.h"
#include "decoding.h"
#include "threads.h"

namespace thalweg {

// Memory for so many numbers, with anything in it.
class Room {
  public:
    Room() = default;
    explicit Room(int64_t count) : held_(std::make_unique_for_overwrite<float[]>(size_t(count))) {}
    operator float*() const { return held_.get(); }

  private:
    std::unique_ptr<float[]> held_;
};

class Linear {
  public:
    using Weight = nanobind::ndarray<nanobind::ro, nanobind::ndim<2>, nanobind::device::cpu>;
    Linear(Weight weight, std::optional<Kept<1>> bias, std::optional<Kept<1>> scale);

    int64_t inner() const { return matrix_.inner; }
    int64_t outer() const { return matrix_.outer; }
    void expect(const char* name, int64_t inner, int64_t outer) const;  // these widths
    // out (rows, outer) = the map of x (rows, inner), each with the stride of its rows.
    void operator()(const float* x, int64_t x_row, int64_t rows, float* out, int64_t out_row, int threads) const;
    void operator()(const float* x, int64_t rows, float* out, int threads) const {
        (*this)(x, inner(), rows, out, outer(), threads);
    }

  private:
    Weight weight_;
    std::optional<Kept<1>> bias_, scale_;
    Matrix matrix_;
};

class Norm {
  public:
    Norm(Kept<1> weight, std::optional<Kept<1>> bias, float eps, bool centred);

    int64_t width() const { return weight_.shape[0]; }
    // total = x + residual, out = its norm, for rows one after the other; without a residual (nullptr) total is x.
    void operator()(const float* x, const float* residual, int64_t rows, float* total, float* out, int threads) const;

  private:
    Kept<1> weight_;
    std::optional<Kept<1>> bias_;
    Normalisation norm_;
};

using SomeMap = std::optional<Linear>;
using SomeNorm = std::optional<Norm>;

// `function(row)` for every row, in as many parts as so many operations a row are worth; or `function(row, memory)`, with
// so many bytes that no other thread uses.
template <class Function>
void each_row(int64_t rows, double operations, int threads, Function&& function, int64_t bytes = 0) {
    share_out(rows * operations, rows, threads, [&](int64_t low, int64_t high) {
        [[maybe_unused]] void* own = bytes ? scratch(bytes) : nullptr;
        for (int64_t r = low; r < high; ++r)
            if constexpr (std::is_invocable_v<Function, int64_t>) function(r);
            else function(r, own);
    });
}

// What is wrong unless the widths of two parts of a model agree.
void expect_width(const char* name, int64_t given, int64_t wanted);

// A model's `__init__`: its members in order, looked at before anybody has it.
template <class Model, class... Members>
void init(Model* self, Members... members) {
    Model made{members...};
    made.check();
    new (self) Model(std::move(made));
}

}  // namespace thalweg
