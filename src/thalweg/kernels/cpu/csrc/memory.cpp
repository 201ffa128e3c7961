#include "memory.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "arrays.h"
#include "threads.h"

namespace thalweg {
namespace nb = nanobind;
namespace {

constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();
constexpr double LANES = 4;   // multiply-adds in the time of an operation, or more
constexpr int64_t PARTS = 2;  // of a pass for every thread: what a late one leaves, another does

// The query in a lane of a panel.
struct Seat {
    int64_t query, step;
    bool resting;  // it has come to rest and only wants its energy
    bool done;
};

// A panel, who is in it, and what it finds in each part of the patterns.
struct Table {
    Panel panel{};
    Seat seats[PANEL];
    std::vector<Pass> passes;
};

// Where few queries are left, vectors of half the length are enough: a step then takes two thirds of the time.
const Memories& kernels_for(const Panel& panel) {
#ifdef THALWEG_X86
    if (panel.busy <= 8 && level() == Level::avx512) return avx2::memories;
#else
    (void)panel;
#endif
    return memories();
}

// log sum exp(beta score) / beta. The weight of the best pattern is 1: there is less where all scores are -inf, and no
// number where one is +inf or none.
double log_sum(const Patterns& patterns, const Pass& pass, int64_t lane) {
    if (!(pass.total[lane] > 0.5f)) return NOT_A_NUMBER;
    return pass.top[lane] + std::log(double(pass.total[lane])) / patterns.beta;
}

// What one association gives.
struct Associations {
    float *mixed, *lse;  // (queries, outer), (queries,)
    bool at_rest() const { return false; }

    void finish(const Patterns& patterns, Table& table) const {
        const Pass& pass = table.passes[0];
        for (int64_t lane = 0; lane < table.panel.busy; ++lane) {
            Seat& seat = table.seats[lane];
            const double sum = log_sum(patterns, pass, lane);
            const float inverse = std::isnan(sum) ? NOT_A_NUMBER : 1.0f / pass.total[lane];
            float* to = mixed + seat.query * patterns.outer;
            for (int64_t i = 0; i < patterns.outer; ++i) to[i] = pass.mixed[i * pass.width + lane] * inverse;
            lse[seat.query] = float(sum);
            seat.done = true;
        }
    }
};

// Where queries come to rest, and the energies on their way.
struct Retrievals {
    float *state, *energies;  // (queries, inner), (queries, most + 1)
    int64_t* steps;
    bool* converged;
    int64_t most;
    double tolerance, offset;
    bool at_rest() const { return most == 0; }

    void finish(const Patterns& patterns, Table& table) const {
        const Pass& pass = table.passes[0];
        Moved moved;
        kernels_for(table.panel).move(patterns, pass, table.panel, moved);
        for (int64_t lane = 0; lane < table.panel.busy; ++lane) {
            Seat& seat = table.seats[lane];
            const double lse = log_sum(patterns, pass, lane), energy = offset + 0.5 * moved.before[lane] - lse;
            rest(seat, seat.resting ? most : seat.step, energy);
            seat.done = seat.resting;
            if (!seat.resting) step(patterns, table.panel, moved, lane, lse, seat);
        }
    }

  private:
    // The energy from the present step of a query to step `last`.
    void rest(const Seat& seat, int64_t last, double energy) const {
        float* own = energies + seat.query * (most + 1);
        std::fill(own + seat.step, own + last + 1, float(energy));
    }

    void step(const Patterns& patterns, const Panel& panel, const Moved& moved, int64_t lane, double lse, Seat& seat) const {
        const double way = moved.way[lane];
        float* own = state + seat.query * patterns.inner;
        if (std::isnan(way) || std::isnan(lse)) {  // it will be no number at all steps
            rest(seat, most, NOT_A_NUMBER);
            std::fill(own, own + patterns.inner, NOT_A_NUMBER);
            steps[seat.query] = most, converged[seat.query] = false;
            seat.done = true;
            return;
        }
        const bool still = std::sqrt(way) <= tolerance;
        ++seat.step;
        if (!still && seat.step < most) return;
        steps[seat.query] = seat.step, converged[seat.query] = still;
        for (int64_t i = 0; i < patterns.inner; ++i) own[i] = panel.state[i * PANEL + lane];
        seat.resting = true;
        if (still && patterns.beta * way < 2e-7) {
            // lse is convex with a curvature of at most beta M^2, so that this is off by less than 1e-7 M^2.
            rest(seat, most, offset + 0.5 * moved.after[lane] - lse - moved.along[lane]);
            seat.done = true;
        }
    }
};

// Queries on their way through tables: lanes make a step of their own query in every pass over the patterns, and a query
// that is done leaves its lane to the next that waits. What a query finds does not depend on who sits beside it.
template <class Answer>
class Recall {
  public:
    Recall(const Patterns& patterns, Array<const float, 2> queries, const Answer& answer, int threads)
        : patterns_(patterns), queries_(queries), answer_(answer) {
        const int64_t panels = (queries.shape[0] + PANEL - 1) / PANEL;
        const double work = double(queries.shape[0]) * patterns.count * (patterns.inner + patterns.outer);
        threads_ = int(std::max<int64_t>(1, std::min<int64_t>(threads, parts_of(work / LANES, patterns.count, threads))));
        parts_ = panels < threads_ ? PARTS * threads_ / std::max<int64_t>(panels, 1) : 1;
        tables_.resize(std::min<int64_t>(panels, threads_));
        const int64_t own = patterns.inner, each = 2 * patterns.outer + BLOCK;  // rows of a table, and of its passes
        auto* place = static_cast<float*>(scratch(tables_.size() * (own + parts_ * each) * PANEL * sizeof(float)));
        for (Table& table : tables_) {
            table.panel.state = place, place += own * PANEL;
            table.passes.resize(parts_);
            for (Pass& pass : table.passes) {
                pass.mixed = place, pass.fresh = place + patterns.outer * PANEL;
                pass.scores = pass.fresh + patterns.outer * PANEL;
                place += each * PANEL;
            }
        }
    }

    void run() {
        if (parts_ == 1) {
            share(tables_.size(), threads_, [&](int64_t k) {
                while (fill(tables_[k])) {
                    kernels_for(tables_[k].panel).sweep(patterns_, tables_[k].panel, 0, patterns_.count, tables_[k].passes[0]);
                    answer_.finish(patterns_, tables_[k]);
                }
            });
            return;
        }
        // Fewer panels than threads: the patterns of a pass are shared out.
        while (std::count_if(tables_.begin(), tables_.end(), [&](Table& table) { return fill(table); })) {
            share(tables_.size() * parts_, threads_, [&](int64_t k) {
                Table& table = tables_[k / parts_];
                const int64_t part = k % parts_, count = patterns_.count;
                if (!table.panel.busy) return;
                const int64_t low = count * part / parts_, high = count * (part + 1) / parts_;
                kernels_for(table.panel).sweep(patterns_, table.panel, low, high, table.passes[part]);
            });
            for (Table& table : tables_) {
                for (int64_t part = 1; table.panel.busy && part < parts_; ++part)
                    kernels_for(table.panel).join(patterns_, table.passes[part], table.passes[0]);
                answer_.finish(patterns_, table);
            }
        }
    }

  private:
    // Lanes whose query is done take the next that waits, or that of the last lane; whether any lane has one.
    bool fill(Table& table) {
        Panel& panel = table.panel;
        const int64_t before = panel.busy, inner = patterns_.inner;
        for (int64_t lane = 0; lane < PANEL; ++lane) {
            if (lane < panel.busy && !table.seats[lane].done) continue;
            const int64_t query = next_.load() < queries_.shape[0] ? next_.fetch_add(1) : queries_.shape[0];
            if (query < queries_.shape[0]) {
                table.seats[lane] = {query, 0, answer_.at_rest(), false};
                const float* from = queries_.data + query * inner;
                for (int64_t i = 0; i < inner; ++i) panel.state[i * PANEL + lane] = from[i];
                panel.busy = std::max(panel.busy, lane + 1);
                continue;
            }
            while (panel.busy > lane && table.seats[panel.busy - 1].done) --panel.busy;
            if (panel.busy <= lane) break;
            const int64_t last = --panel.busy;
            table.seats[lane] = table.seats[last];
            for (int64_t i = 0; i < inner; ++i) panel.state[i * PANEL + lane] = panel.state[i * PANEL + last];
        }
        for (int64_t i = 0; i < inner && panel.busy != before; ++i)
            std::fill(panel.state + i * PANEL + panel.busy, panel.state + (i + 1) * PANEL, 0.0f);
        panel.mixing = std::any_of(table.seats, table.seats + panel.busy, [](const Seat& seat) { return !seat.resting; });
        return panel.busy > 0;
    }

    Patterns patterns_;
    Array<const float, 2> queries_;
    Answer answer_;
    int threads_;
    int64_t parts_;
    std::vector<Table> tables_;
    std::atomic<int64_t> next_{0};
};

Patterns patterns_of(Array<const float, 2> queries, Array<const float, 2> keys, Array<const float, 2> values, double beta) {
    const auto [count, inner] = keys.shape;
    expect("queries", queries, {queries.shape[0], inner});
    expect("values", values, {count, values.shape[1]});
    if (!count) throw ShapeError("`keys` must hold at least one pattern, got none");
    if (!(beta > 0)) throw ShapeError(said("`beta` must be positive, got ", beta));
    const double most = std::numeric_limits<float>::max(), bits = 25 + std::log2(double(count));
    // So far below the top a pattern adds less than one part in 2^24 even if all of them lie there.
    return {keys.data, values.data, count, inner, values.shape[1], float(std::min(beta, most)), float(bits * std::log(2.0))};
}

void associate(Array<const float, 2> queries, Array<const float, 2> keys, Array<const float, 2> values, double beta,
               Array<float, 2> mixed, Array<float, 1> lse, int threads) {
    const Patterns patterns = patterns_of(queries, keys, values, beta);
    expect("mixed", mixed, {queries.shape[0], patterns.outer});
    expect("lse", lse, {queries.shape[0]});
    Recall(patterns, queries, Associations{mixed.data, lse.data}, threads).run();
}

// log N / beta + M^2 / 2 for N patterns whose largest norm is M.
double offset_of(const Patterns& p, int threads) {
    const int64_t parts = parts_of(double(p.count) * p.inner / LANES, p.count, threads);
    std::vector<float> squares(parts);
    share(parts, threads, [&](int64_t k) {
        const int64_t low = p.count * k / parts, high = p.count * (k + 1) / parts;
        squares[k] = memories().largest_square(p.keys + low * p.inner, high - low, p.inner);
    });
    float largest = 0.0f;
    for (float square : squares) largest = square <= largest ? largest : square;
    return std::log(double(p.count)) / p.beta + 0.5 * largest;
}

void settle(Array<const float, 2> queries, Array<const float, 2> keys, double beta, double tolerance, Array<float, 2> state,
            Array<float, 2> energies, Array<int64_t, 1> steps, Array<bool, 1> converged, int threads) {
    const Patterns patterns = patterns_of(queries, keys, keys, beta);
    const int64_t count = queries.shape[0], most = energies.shape[1] - 1;
    if (most < 0) throw ShapeError("`energies` must have a column for every step and one more, got none");
    expect("state", state, queries.shape);
    expect("energies", energies, {count, most + 1});
    expect("steps", steps, {count});
    expect("converged", converged, {count});
    const Retrievals answer{state.data, energies.data, steps.data, converged.data, most, tolerance, offset_of(patterns, threads)};
    if (most == 0) {
        std::copy(queries.data, queries.data + queries.size(), state.data);
        std::fill(steps.data, steps.data + count, 0);
        std::fill(converged.data, converged.data + count, false);
    }
    Recall(patterns, queries, answer, threads).run();
}

}  // namespace

void add_memory(nb::module_& m) {
    const auto free = nb::call_guard<nb::gil_scoped_release>();
    m.def("associate", &associate, free);
    m.def("settle", &settle, free);
}

}  // namespace thalweg
