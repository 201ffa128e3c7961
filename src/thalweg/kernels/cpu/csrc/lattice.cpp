// Paths through grids as functions of arrays: every shape and every index is looked at here, before a kernel follows it.
#include "lattice.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "arrays.h"
#include "threads.h"

namespace thalweg {
namespace nb = nanobind;
namespace {

constexpr double OPERATIONS = 40;  // for a move into a cell
using Counts = Array<const int64_t, 1>;
using Table = Array<const int64_t, 2>;

template <class T>
const LatticeKernelsOf<T>& kernels() {
    return lattice_kernels();
}

// What most functions take: scores (B, I + 1, J + 1, M), or (1, B, I, C) with labels (B, J + 1); moves (M, 2); rows and
// columns (B,); labels; ends and band.
template <class T>
using Given = std::tuple<Array<const T, 4>, Table, Counts, Counts, std::optional<Table>, int64_t, int64_t>;

template <class T>
Lattices<T> checked(const Given<T>& given) {
    const auto& [scores, moves, rows, columns, labels, ends, band] = given;
    const auto& s = scores.shape;
    const int64_t batch = labels ? s[1] : s[0], height = labels ? s[2] + 1 : s[1], width = labels ? labels->shape[1] : s[2];
    const int64_t kinds = moves.shape[0];
    if (!batch || !height || !width || !kinds || !s[3]) throw ShapeError("`scores` must have items, cells and moves");
    if (kinds > MOST_MOVES) throw ShapeError(said("there may be ", MOST_MOVES, " `moves`, got ", kinds));
    expect("moves", moves, {kinds, 2});
    expect_range("moves", moves, 0, int64_t(1) << 31);
    expect("rows", rows, {batch});
    expect_range("rows", rows, 0, height);
    expect("columns", columns, {batch});
    expect_range("columns", columns, 0, width);
    if (labels) {
        expect("labels", *labels, {batch, width});
        expect_range("labels", *labels, 0, s[3]);
        expect("scores", scores, {1, batch, height - 1, s[3]});
    } else {
        expect("scores", scores, {batch, height, width, kinds});
    }
    if (ends < 0 || band >= int64_t(1) << 31 || height >= int64_t(1) << 31 || width * kinds >= int64_t(1) << 26)
        throw ShapeError(said("`ends` must be 0 or more, `band` below 2^31 and rows below 2^26 scores, got ", ends, ", ", band,
                              " and ", width * kinds));
    int64_t skew = 0, margin = 0;
    for (int64_t m = 0; m < kinds; ++m) {
        const int64_t a = moves.data[2 * m], b = moves.data[2 * m + 1];
        if (!a && !b) throw ShapeError("`moves` must lead to another cell");
        if (!a) skew = 1;
        if (b < width) margin = std::max(margin, b);
    }
    if (labels && skew) throw ShapeError("`moves` of grids with labels must lead to later rows");
    const int64_t high = *std::max_element(rows.data, rows.data + batch);
    const int64_t sweeps = high + skew * *std::max_element(columns.data, columns.data + batch) + 1;
    constexpr int64_t lanes = 64 / sizeof(T);
    const int64_t row = (margin + width + lanes + lanes - 1) / lanes * lanes;
    return {scores.data, moves.data, rows.data, columns.data, labels ? labels->data : nullptr, batch, height, width,
            kinds, s[3], ends, band, skew, sweeps, row, margin};
}

// Calls `work(item, room)` for every item.
template <class T, class Work>
void over_items(const Lattices<T>& all, int threads, Work work) {
    double operations = 0;
    for (int64_t b = 0; b < all.batch; ++b)
        operations += OPERATIONS * double(all.rows[b] + 1) * double(all.columns[b] + 1) * double(all.kinds);
    const int64_t table = all.sweeps * all.row;
    share_out(operations, all.batch, threads, [&](int64_t low, int64_t high) {
        T* sums = static_cast<T*>(scratch((3 * table * sizeof(T)) + all.sweeps * sizeof(double)));
        const LatticeRoom<T> room{sums, sums + table, sums + 2 * table, reinterpret_cast<double*>(sums + 3 * table)};
        for (int64_t b = low; b < high; ++b) work(b, room);
    });
}

template <class T>
void value(const Given<T>& given, Array<T, 1> values, const std::optional<Array<T, 4>>& gradient, int threads) {
    const auto all = checked(given);
    expect("values", values, {all.batch});
    if (gradient && all.labels) expect("gradient", *gradient, {1, all.batch, all.height - 1, all.width});
    if (gradient && !all.labels) expect("gradient", *gradient, std::get<0>(given).shape);
    const int64_t size = gradient ? gradient->size() / all.batch : 0;
    over_items(all, threads, [&](int64_t b, const LatticeRoom<T>& room) {
        values.data[b] = T(kernels<T>().value(all, b, room, gradient ? gradient->data + b * size : nullptr));
    });
}

// The gradient in what rows emit, (B, I, C), of probabilities of cells, (B, I, J + 1): added up by label, times weights.
template <class T>
void emitted(Array<const T, 3> cells, Table labels, Array<const T, 1> weights, Array<T, 3> out, int threads) {
    const auto [batch, rows, size] = out.shape;
    const int64_t width = labels.shape[1];
    expect("cells", cells, {batch, rows, width});
    expect("labels", labels, {batch, width});
    expect_range("labels", labels, 0, size);
    expect("weights", weights, {batch});
    const int64_t all = batch * rows;
    share_out(double(all) * double(size + 4 * width), all, threads, [&, rows = rows, size = size](int64_t low, int64_t high) {
        for (int64_t row = low; row < high; ++row) {
            T* to = out.data + row * size;
            const T weight = weights.data[row / rows], *from = cells.data + row * width;
            const int64_t* label = labels.data + row / rows * width;
            std::fill_n(to, size, T(0));
            for (int64_t j = 0; j < width; ++j) to[label[j]] += weight * from[j];
        }
    });
}

template <class T>
void sample(const Given<T>& given, Array<const T, 3> uniforms, Array<T, 1> values, Array<int64_t, 3> paths, int threads) {
    const auto all = checked(given);
    const int64_t draws = paths.shape[0], steps = paths.shape[2];
    expect("values", values, {all.batch});
    expect("paths", paths, {draws, all.batch, steps});
    expect("uniforms", uniforms, {draws, all.batch, steps + 2});
    over_items(all, threads, [&](int64_t b, const LatticeRoom<T>& room) {
        values.data[b] = T(kernels<T>().sample(all, b, room, uniforms.data, paths.data, draws, steps));
    });
}

template <class T>
void best(const Given<T>& given, Array<T, 2> values, Array<int64_t, 3> paths, int threads) {
    const auto all = checked(given);
    const int64_t k = values.shape[1], steps = paths.shape[2], cells = all.height * all.width;
    expect("values", values, {all.batch, k});
    expect("paths", paths, {all.batch, k, steps});
    if (!k || k > std::numeric_limits<int32_t>::max()) throw ShapeError(said("`k` must be at least 1 and below 2^31, got ", k));
    const double work = OPERATIONS * double(cells) * double(all.kinds + k) * double(all.batch);
    share_out(work, all.batch, threads, [&](int64_t low, int64_t high) {
        double* lists = static_cast<double*>(scratch(2 * (cells + 1) * k * 8));
        int64_t* places = reinterpret_cast<int64_t*>(lists + (cells + 1) * k);
        const PathLists room{lists, lists + cells * k, places, places + cells * k};
        for (int64_t b = low; b < high; ++b)
            kernels<T>().best(all, b, room, k, values.data + b * k, paths.data + b * k * steps, steps);
    });
}

template <class T>
void add_of(nb::module_& m) {
    const auto free = nb::call_guard<nb::gil_scoped_release>();
    m.def("lattice_value", &value<T>, free);
    m.def("lattice_emitted", &emitted<T>, free);
    m.def("lattice_sample", &sample<T>, free);
    m.def("lattice_best", &best<T>, free);
}

}  // namespace

void add_lattice(nb::module_& m) {
    add_of<float>(m);
    add_of<double>(m);
}

}  // namespace thalweg
