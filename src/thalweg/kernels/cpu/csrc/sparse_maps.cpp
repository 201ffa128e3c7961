#include "sparse_maps.h"

#include <nanobind/stl/optional.h>

#include <limits>

#include "arrays.h"
#include "threads.h"

namespace thalweg {
namespace nb = nanobind;
namespace {

constexpr double OPERATIONS = 2;  // for an entry

void check(const std::array<int64_t, 2>& shape, Array<const double, 1> alphas) {
    expect("alphas", alphas, {shape[0]});
    if (shape[1] > std::numeric_limits<int32_t>::max())
        throw ShapeError(said("rows must have less than 2^31 entries, got ", shape[1]));
}

template <class T, class Rows>
void over_rows(void (*part)(const Rows&, int64_t, int64_t, const MapRoom<T>&), const Rows& rows, int64_t count, int threads) {
    const int64_t wide = rows.size + SPARE;
    share_out(OPERATIONS * count * rows.size, count, threads, [&](int64_t low, int64_t high) {
        double* z = static_cast<double*>(scratch((2 * wide + rows.size / SURVEYED + 1) * 8 + rows.size * 4));
        double* tops = z + 2 * wide;
        auto* places = reinterpret_cast<int32_t*>(tops + rows.size / SURVEYED + 1);
        part(rows, low, high, {reinterpret_cast<T*>(tops), z, z + wide, places});
    });
}

template <class T>
void entmax(Array<const T, 2> scores, Array<const double, 1> alphas, std::optional<Array<const int64_t, 1>> gold,
            Array<T, 2> weights, std::optional<Array<T, 1>> values, int threads) {
    const auto [count, size] = scores.shape;
    check(scores.shape, alphas);
    expect("weights", weights, scores.shape);
    if (values) expect("values", *values, {count});
    if (gold) {
        expect("gold", *gold, {count});
        expect_range("gold", *gold, 0, size);
    }
    const MapRows<T> rows{scores.data,  size, alphas.data, gold ? gold->data : nullptr,
                          weights.data, values ? values->data : nullptr};
    over_rows<T>(sparse_maps().SparseMapsOf<T>::forward, rows, count, threads);
}

template <class T>
void entmax_vjp(Array<const T, 2> weights, Array<const T, 2> grad, Array<const double, 1> alphas, Array<T, 2> out, int threads) {
    check(weights.shape, alphas);
    expect("grad", grad, weights.shape);
    expect("out", out, weights.shape);
    const MapGradients<T> rows{weights.data, grad.data, weights.shape[1], alphas.data, out.data};
    over_rows<T>(sparse_maps().SparseMapsOf<T>::backward, rows, weights.shape[0], threads);
}

}  // namespace

void add_sparse_maps(nb::module_& m) {
    const auto free = nb::call_guard<nb::gil_scoped_release>();
    m.def("entmax", &entmax<float>, free);
    m.def("entmax", &entmax<double>, free);
    m.def("entmax_vjp", &entmax_vjp<float>, free);
    m.def("entmax_vjp", &entmax_vjp<double>, free);
}

}  // namespace thalweg
