// Segmentations as functions of arrays: every shape and every length is looked at here, before a kernel follows it.
#include "segments.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <tuple>

#include "arrays.h"
#include "threads.h"

namespace thalweg {
namespace nb = nanobind;
namespace {

// What every function takes: parts (B, T, 2, C), durations (1 or B, K, C), moves (1 or B, C, C) and lengths (B,).
using Given = std::tuple<Array<const double, 4>, Array<const double, 3>, Array<const double, 3>, Array<const int64_t, 1>>;
using Gradients = std::tuple<Array<double, 4>, Array<double, 3>, Array<double, 3>>;  // by item

Segments checked(const Given& scores) {
    const auto& [parts, durations, moves, lengths] = scores;
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
    share_out(work, given.batch, threads, [&](int64_t low, int64_t high) {
        double* room = static_cast<double*>(scratch(given.room() * sizeof(double)));
        for (int64_t b = low; b < high; ++b) run(b, room);
    });
}

void likelihood(const Given& scores, Array<double, 1> values, const std::optional<Gradients>& gradients, int threads) {
    const Segments given = checked(scores);
    const int64_t batch = given.batch, steps = given.steps, most = given.most, size = given.size;
    expect("values", values, {batch});
    const auto [d_parts, d_durations, d_moves] = gradients.value_or(Gradients{});
    if (gradients) {
        expect("d_parts", d_parts, {batch, steps, 2, size});
        expect("d_durations", d_durations, {batch, most, size});
        expect("d_moves", d_moves, {batch, size, size});
    }
    const SegmentGradient all{d_parts.data, d_durations.data, d_moves.data};
    over_items(given, threads, [&](int64_t b, double* room) {
        SegmentGradient own{};
        if (gradients)
            own = {all.parts + b * steps * 2 * size, all.durations + b * most * size, all.moves + b * size * size};
        values.data[b] = segment_kernels().likelihood(given, b, own, room);
    });
}

void viterbi(const Given& scores, Array<int64_t, 2> labels, int threads) {
    const Segments given = checked(scores);
    expect("labels", labels, {given.batch, given.steps});
    over_items(given, threads, [&](int64_t b, double* room) {
        segment_kernels().viterbi(given, b, labels.data + b * given.steps, room);
    });
}

void sample(const Given& scores, Array<const double, 4> uniforms, Array<int64_t, 3> labels, int threads) {
    const Segments given = checked(scores);
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
    m.def("segments_likelihood", &likelihood, free);
    m.def("segments_viterbi", &viterbi, free);
    m.def("segments_sample", &sample, free);
}

}  // namespace thalweg
