#include "layers.h"

#include <nanobind/stl/optional.h>

#include <algorithm>

namespace thalweg {
namespace nb = nanobind;
namespace {

Stored stored(const Linear::Weight& weight) {
    if (weight.dtype() == nb::dtype<float>()) return Stored::single;
    if (weight.dtype() == nb::dtype<int8_t>()) return Stored::byte;
    if (weight.dtype() == nb::dtype<int16_t>()) return Stored::half;
    throw ShapeError("`weight` must be float32, int8, or bfloat16 as the int16 of its bits");
}

const float* numbers(const char* name, const std::optional<Kept<1>>& given, int64_t count) {
    if (!given) return nullptr;
    expect_width(name, given->shape[0], count);
    return given->data;
}

// y (R, out) of x (R, in), for those who call products one by one.
void linear(const Linear& map, Array<const float, 2> x, Array<float, 2> out, int threads) {
    expect("x", x, {x.shape[0], map.inner()});
    expect("out", out, {x.shape[0], map.outer()});
    map(x.data, x.shape[0], out.data, threads);
}

}  // namespace

void expect_width(const char* name, int64_t given, int64_t wanted) {
    if (given != wanted) throw ShapeError(said("`", name, "` must be ", wanted, " wide, got ", given));
}

Linear::Linear(Weight weight, std::optional<Kept<1>> bias, std::optional<Kept<1>> scale)
    : weight_(weight), bias_(bias), scale_(scale) {
    const int64_t outer = int64_t(weight.shape(0)), inner = int64_t(weight.shape(1));
    if (inner > 1 && weight.stride(1) != 1)
        throw ShapeError("`weight` must have the numbers of a row one after the other");
    matrix_ = {weight.data(), stored(weight), outer, inner, weight.stride(0), numbers("scale", scale, outer),
               numbers("bias", bias, outer)};
}

void Linear::expect(const char* name, int64_t inner, int64_t outer) const {
    expect_width(name, this->inner(), inner);
    expect_width(name, this->outer(), outer);
}

void Linear::operator()(const float* x, int64_t x_row, int64_t rows, float* out, int64_t out_row, int threads) const {
    share_out(2.0 * rows * inner() * outer(), (outer() + 3) / 4, threads, [&](int64_t low, int64_t high) {
        decoding().linear(matrix_, x, x_row, rows, 4 * low, std::min(4 * high, outer()), out, out_row);
    });
}

Norm::Norm(Kept<1> weight, std::optional<Kept<1>> bias, float eps, bool centred) : weight_(weight), bias_(bias) {
    norm_ = {weight.data, numbers("bias", bias, width()), eps, centred};
}

void Norm::operator()(const float* x, const float* residual, int64_t rows, float* total, float* out,
                      int threads) const {
    each_row(rows, 10.0 * width(), threads, [&, wide = width()](int64_t r) {
        const int64_t at = r * wide;
        decoding().norm(norm_, x + at, residual ? residual + at : nullptr, wide, total + at, out + at);
    });
}

void add_layers(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<Linear>(m, "Linear", "A linear map with weights in float32, bfloat16 or int8.")
        .def(nb::init<Linear::Weight, std::optional<Kept<1>>, std::optional<Kept<1>>>(), "weight"_a.noconvert(),
             "bias"_a = nb::none(), "scale"_a = nb::none())
        .def("__call__", &linear, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<Norm>(m, "Norm", "A LayerNorm, or a norm by the root mean square.")
        .def(nb::init<Kept<1>, std::optional<Kept<1>>, float, bool>());
}

}  // namespace thalweg
