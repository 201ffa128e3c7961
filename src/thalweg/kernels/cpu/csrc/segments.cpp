// Segmentations as functions of arrays: every shape and every length is looked at here, before a kernel follows it.
#include "segments.h"

#include <nanobind/stl/optional.h>

#include <optional>

#include "arrays.h"
#include "threads.h"

namespace thalweg {
namespace nb = nanobind;
namespace {

using Parts = Array<const double, 4>;   // (B, T, 2, C)
using Tables = Array<const double, 3>;  // durations (1 or B, K, C), moves (1 or B, C, C)
using Lengths = Array<const int64_t, 1>;

Segments checked(const Parts& parts, const Tables& durations, const Tables& moves, const Lengths& lengths) {
    const auto [batch, steps, two, size] = parts.shape;
    const int64_t most = durations.shape[1];
    if (!batch || !steps || !size || !most) throw ShapeError("`parts` and `durations` must have items, positions and labels");
    expect("parts", parts, {batch, steps, 2, size});
    expect("durations", durations, {durations.shape[0] == batch ? batch : 1, most, size});
    expect("moves", moves, {moves.shape[0] == batch ? batch : 1, size, size});
    expect("lengths", lengths, {batch});
    expect_range("lengths", lengths, 1, steps + 1);
    return {parts.data, durations.data, moves.data, lengths.data, batch, steps, most, size,
            durations.shape[0] > 1 ? most * size : 0, moves.shape[0] > 1 ? size * size : 0};
}

// Calls run(item, room) for all items.
template <class Run>
void over_items(const Segments& given, int threads, Run run) {
    const double work = 8.0 * given.batch * given.steps * given.size * (given.most + given.size);
    const int64_t parts = parts_of(work, given.batch, threads);
    share(parts, threads, [&](int64_t part) {
        double* room = static_cast<double*>(scratch(given.room() * sizeof(double)));
        for (int64_t b = given.batch * part / parts; b < given.batch * (part + 1) / parts; ++b) run(b, room);
    });
}

void likelihood(Parts parts, Tables durations, Tables moves, Lengths lengths, Array<double, 1> values,
                std::optional<Array<double, 4>> d_parts, std::optional<Array<double, 3>> d_durations,
                std::optional<Array<double, 3>> d_moves, int threads) {
    const Segments given = checked(parts, durations, moves, lengths);
    const auto [batch, steps, most, size] = std::array{given.batch, given.steps, given.most, given.size};
    expect("values", values, {batch});
    const bool asked = d_parts && d_durations && d_moves;
    if (asked) {
        expect("d_parts", *d_parts, {batch, steps, 2, size});
        expect("d_durations", *d_durations, {batch, most, size});
        expect("d_moves", *d_moves, {batch, size, size});
    } else if (d_parts || d_durations || d_moves) {
        throw ShapeError("gradients must be given all or none");
    }
    over_items(given, threads, [&](int64_t b, double* room) {
        SegmentGradient gradient{};
        if (asked)
            gradient = {d_parts->data + b * given.steps * 2 * given.size, d_durations->data + b * given.most * given.size,
                        d_moves->data + b * given.size * given.size};
        values.data[b] = segment_kernels().likelihood(given, b, gradient, room);
    });
}

void viterbi(Parts parts, Tables durations, Tables moves, Lengths lengths, Array<int64_t, 2> labels, int threads) {
    const Segments given = checked(parts, durations, moves, lengths);
    expect("labels", labels, {given.batch, given.steps});
    over_items(given, threads, [&](int64_t b, double* room) {
        segment_kernels().viterbi(given, b, labels.data + b * given.steps, room);
    });
}

void sample(Parts parts, Tables durations, Tables moves, Lengths lengths, Array<const double, 4> uniforms,
            Array<int64_t, 3> labels, int threads) {
    const Segments given = checked(parts, durations, moves, lengths);
    const int64_t count = labels.shape[0];
    expect("labels", labels, {count, given.batch, given.steps});
    expect("uniforms", uniforms, {count, given.batch, given.steps, 2});
    over_items(given, threads, [&](int64_t b, double* room) {
        const int64_t at = b * given.steps;
        segment_kernels().sample(given, b, count, given.batch * given.steps, uniforms.data + 2 * at, labels.data + at, room);
    });
}

}  // namespace

void add_segments(nb::module_& m) {
    const auto free = nb::call_guard<nb::gil_scoped_release>();
    m.def("segments_likelihood", &likelihood, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
          nb::arg().none(), nb::arg().none(), nb::arg(), free);
    m.def("segments_viterbi", &viterbi, free);
    m.def("segments_sample", &sample, free);
}

}  // namespace thalweg
