// Linear chains as functions of arrays: every shape and every index is looked at here, before a kernel follows it.
#include "chain.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "arrays.h"
#include "threads.h"

namespace thalweg {
namespace nb = nanobind;
namespace {

template <class T>
using Optional = std::optional<T>;
using Labels = Array<const int64_t, 2>;

template <class T>
const ChainKernelsOf<T>& kernels() {
    return chain_kernels();
}

// What every function takes: emissions (B, T, C); transitions (1 or B, 1 or T - 1, C, C), or (1, 1, 1, E) with edges
// (2, E), their sources and targets; start and end (C,); lengths (B,).
template <class T>
using Given = std::tuple<Array<const T, 3>, Array<const T, 4>, Optional<Labels>, Array<const T, 1>, Array<const T, 1>,
                         Array<const int64_t, 1>>;

template <class T>
struct Checked {
    Chains<T> chains{};
    std::vector<int64_t> into;  // of sparse transitions

    explicit Checked(const Given<T>& given) {
        const auto& [emissions, transitions, edges, start, end, lengths] = given;
        const auto [batch, steps, size] = emissions.shape;
        const auto& moves = transitions.shape;
        if (!batch || !steps || !size) throw ShapeError("`emissions` must have items, positions and labels");
        const bool by_item = !edges && moves[0] == batch, by_step = by_item && moves[1] == steps - 1;
        const int64_t rows = edges ? 1 : size, columns = edges ? edges->shape[1] : size;
        expect("transitions", transitions, {by_item ? batch : 1, by_step ? steps - 1 : 1, rows, columns});
        expect("start", start, {size});
        expect("end", end, {size});
        expect("lengths", lengths, {batch});
        for (int64_t b = 0; b < batch; ++b) {
            const int64_t length = lengths.data[b];
            if (length < 1 || length > steps)
                throw ShapeError(said("`lengths` must lie in 1..T with T = ", steps, ", got ", length, " at batch item ", b));
        }
        chains = {emissions.data, transitions.data, start.data, end.data, lengths.data, batch, steps, size, rows * columns,
                  moves[0] > 1 ? moves[1] * rows * columns : 0, moves[1] > 1 ? rows * columns : 0, {}};
        if (edges) sort(*edges);
    }
    void sort(const Labels& edges) {
        const int64_t count = edges.shape[1], *sources = edges.data, *targets = edges.data + count;
        expect("edges", edges, {2, count});
        expect_range("edges", edges, 0, chains.size);
        into.resize(chains.size + 1);
        for (int64_t k = 0; k < count; ++k) {
            if (k && (targets[k] < targets[k - 1] || (targets[k] == targets[k - 1] && sources[k] <= sources[k - 1])))
                throw ShapeError("`edges` must be distinct and sorted by target, then source");
            ++into[targets[k] + 1];
        }
        std::partial_sum(into.begin(), into.end(), into.begin());
        chains.edges = {sources, targets, into.data()};
    }
};

template <class T>
void check_gold(const Chains<T>& chains, const Labels& gold) {
    expect("gold", gold, {chains.batch, chains.steps});
    for (int64_t b = 0; b < chains.batch; ++b) {
        for (int64_t t = 0; t < chains.lengths[b]; ++t) {
            const int64_t label = gold.data[b * chains.steps + t];
            if (label < 0 || label >= chains.size)
                throw ShapeError(said("labels must lie in 0..", chains.size - 1, ", got ", label, " at position ", t,
                                      " of batch item ", b));
        }
    }
}

// Items by falling length, in parts that are whole groups.
struct Plan {
    std::vector<int64_t> items;
    int64_t parts = 1, groups = 1;

    template <class T>
    Plan(const Chains<T>& chains, int threads) : items(chains.batch), groups((chains.batch + GROUP - 1) / GROUP) {
        std::iota(items.begin(), items.end(), 0);
        std::stable_sort(items.begin(), items.end(), [&](int64_t a, int64_t b) { return chains.lengths[a] > chains.lengths[b]; });
        const double work = 6.0 * chains.batch * chains.steps * chains.moves;
        parts = parts_of(work, groups, threads);
    }
    // Calls run(part, items, count) for all parts.
    template <class Run>
    void go(int threads, Run run) const {
        share(parts, threads, [&](int64_t part) {
            const int64_t low = groups * part / parts * GROUP;
            const int64_t high = std::min<int64_t>(groups * (part + 1) / parts * GROUP, items.size());
            run(part, items.data() + low, high - low);
        });
    }
};

template <class T>
Room<T> room_of(const Chains<T>& chains, int64_t more_wide = 0, int64_t back = 0) {
    const int64_t numbers = numbers_of(chains) * sizeof(T), wide = (wide_of(chains) + more_wide) * 8;
    char* block = static_cast<char*>(scratch(numbers + 64 + wide + back * 8));
    char* after = block + (numbers + 63) / 64 * 64;
    return {reinterpret_cast<T*>(block), reinterpret_cast<double*>(after), reinterpret_cast<int64_t*>(after + wide)};
}

// Of emissions (B, T, C); transitions, (1, 1, ..) for all, (B, 1, ..) by item or (B, T - 1, ..) by step; start and end.
template <class T>
using Gradients = std::tuple<Array<T, 3>, Array<T, 4>, Array<T, 1>, Array<T, 1>>;

// log Z, or score(gold) - log Z, into values; their sum; and the gradient of log Z - score(gold) where there is room.
template <class T>
double likelihood(const Given<T>& given, const Optional<Labels>& gold, const Optional<Array<const T, 1>>& weights,
                  Array<T, 1> values, const Optional<Gradients<T>>& gradients, int threads) {
    const Checked<T> checked(given);
    const Chains<T>& chains = checked.chains;
    const int64_t batch = chains.batch, steps = chains.steps, size = chains.size;
    if (gold) check_gold(chains, *gold);
    if (weights) expect("weights", *weights, {batch});
    expect("values", values, {batch});
    Likelihood<T> job{gold ? gold->data : nullptr, weights ? weights->data : nullptr, values.data, nullptr, nullptr, MovesOf::all};
    const auto [d_emissions, d_transitions, d_start, d_end] = gradients.value_or(Gradients<T>{});
    if (gradients) {
        const auto &moves = std::get<1>(given).shape, &found = d_transitions.shape;
        job.added = found[1] != 1 ? MovesOf::step : found[0] != 1 ? MovesOf::item : MovesOf::all;
        const int64_t items = job.added == MovesOf::all ? moves[0] : batch;
        const int64_t apart = job.added == MovesOf::step ? steps - 1 : moves[1];
        expect("d_emissions", d_emissions, {batch, steps, size});
        expect("d_transitions", d_transitions, {items, apart, moves[2], moves[3]});
        expect("d_start", d_start, {size});
        expect("d_end", d_end, {size});
        job.d_emissions = d_emissions.data;
        if (job.added != MovesOf::all) job.d_moves = d_transitions.data;
        if (job.added == MovesOf::item) std::fill_n(job.d_moves, batch * chains.moves, T(0));
    }
    const Plan plan(chains, threads);
    const int64_t own = gradients ? (job.added == MovesOf::all ? chains.moves : 0) + 2 * size : 0;
    std::vector<double> kept(plan.parts * own), totals(plan.parts);
    plan.go(threads, [&](int64_t part, const int64_t* items, int64_t count) {
        double* start = kept.data() + part * own;
        Sums sums{start + 2 * size, start, start + size, 0.0};
        kernels<T>().likelihood(chains, job, items, count, sums, room_of(chains));
        totals[part] = sums.value;
    });
    for (int64_t k = 0; k < own; ++k) {
        double sum = 0;
        for (int64_t part = 0; part < plan.parts; ++part) sum += kept[part * own + k];
        (k < size ? d_start.data[k] : k < 2 * size ? d_end.data[k - size] : d_transitions.data[k - 2 * size]) = T(sum);
    }
    return std::accumulate(totals.begin(), totals.end(), 0.0);
}

template <class T>
void viterbi(const Given<T>& given, Array<T, 1> scores, Array<int64_t, 2> labels, int threads) {
    const Checked<T> checked(given);
    expect("scores", scores, {checked.chains.batch});
    expect("labels", labels, {checked.chains.batch, checked.chains.steps});
    Plan(checked.chains, threads).go(threads, [&](int64_t, const int64_t* items, int64_t count) {
        kernels<T>().viterbi(checked.chains, items, count, scores.data, labels.data, room_of(checked.chains));
    });
}

template <class T>
void top_k(const Given<T>& given, Array<T, 2> scores, Array<int64_t, 3> labels, int threads) {
    const Checked<T> checked(given);
    const Chains<T>& chains = checked.chains;
    const int64_t k = scores.shape[1], block = chains.size * k;
    if (k < 1) throw ShapeError(said("k must be at least 1, got ", k));
    expect("scores", scores, {chains.batch, k});
    expect("labels", labels, {chains.batch, k, chains.steps});
    Plan(chains, threads).go(threads, [&](int64_t, const int64_t* items, int64_t count) {
        const Room<T> room = room_of(chains, 2 * block, block * (chains.steps + 1));
        for (int64_t n = 0; n < count; ++n) kernels<T>().top_k(chains, items[n], k, scores.data, labels.data, room);
    });
}

template <class T>
void sample(const Given<T>& given, Array<const T, 3> uniforms, Array<int64_t, 3> labels, int threads) {
    const Checked<T> checked(given);
    const Chains<T>& chains = checked.chains;
    const int64_t count = uniforms.shape[0];
    expect("uniforms", uniforms, {count, chains.batch, chains.steps});
    expect("labels", labels, uniforms.shape);
    Plan(chains, threads).go(threads, [&](int64_t, const int64_t* items, int64_t number) {
        for (int64_t n = 0; n < number; ++n)
            kernels<T>().sample(chains, items[n], count, uniforms.data, labels.data, room_of(chains));
    });
}

template <class T>
void add_of(nb::module_& m) {
    const auto free = nb::call_guard<nb::gil_scoped_release>();
    m.def("chain_likelihood", &likelihood<T>, free);
    m.def("chain_viterbi", &viterbi<T>, free);
    m.def("chain_top_k", &top_k<T>, free);
    m.def("chain_sample", &sample<T>, free);
}

}  // namespace

void add_chain(nb::module_& m) {
    add_of<float>(m);
    add_of<double>(m);
}

}  // namespace thalweg
