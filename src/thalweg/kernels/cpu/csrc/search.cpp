#include "search.h"

#include <nanobind/stl/optional.h>

#include <chrono>
#include <cmath>
#include <limits>

namespace thalweg {
namespace nb = nanobind;
namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct Candidate {
    float score;
    int64_t code;  // row * V + symbol
};

struct Finished {
    float rank = NEVER, score = NEVER;
    int64_t steps = 0, code = 0;
};

// Where the search of one item stands.
struct Item {
    std::vector<float> live;         // (W,) log-probabilities of its rows, -inf where there is no row
    std::vector<Finished> finished;  // (k,) best first
    float dropped = NEVER;           // the best score that was ever let go of
    int64_t ended = 0;               // the step after which nothing can change; 0 before
    std::vector<int64_t> history;    // (steps, W) row * V + symbol
    std::vector<Candidate> best;     // of the present step
};

class Beam {
  public:
    Beam(const Request& request, int64_t items)
        : r_(request), W_(request.width), V_(request.mask.shape[0]), eos_(request.eos.value_or(-1)),
          items_(size_t(items)), order_(size_t(items)), logits_(items * W_ * V_) {
        for (int64_t n = 0; n < items; ++n) {
            Item& item = items_[size_t(n)];
            item.live.assign(size_t(W_), NEVER);
            item.live[0] = 0.0f;
            item.finished.resize(size_t(request.k));
            item.best.resize(size_t(2 * W_ + 1));
            order_[size_t(n)] = n;
        }
        tokens_.assign(size_t(items), request.bos);
        sources_ = parents_ = order_;
    }

    void run(Steps& steps) {
        for (int64_t t = 1; t <= r_.max_length && !order_.empty(); ++t) {
            check_interrupt();
            steps.step({t - 1, int64_t(tokens_.size()), tokens_.data(), parents_.data(), sources_.data()}, logits_);
            const int64_t each = t == 1 ? 1 : W_;
            each_row(int64_t(order_.size()), 20.0 * each * V_, r_.threads, [&](int64_t slot) {
                Item& item = items_[size_t(order_[size_t(slot)])];
                if (advance(item, t, logits_ + slot * each * V_)) item.ended = t;
            });
            next_rows(t, each);
        }
    }

    nb::tuple answers() const;

  private:
    static bool before(float x, float y) { return x > y || (x != x && y == y); }  // NaN before all, so that it is seen

    // The 2 W + 1 best continuations of an item, best first; how many there are.
    int64_t choose(Item& item, int64_t step, float* logits) const {
        const float* barred = r_.barred ? r_.barred->data : nullptr;
        const int64_t most = 2 * W_ + 1, early = step < r_.min_length ? eos_ : -1;
        int64_t count = 0;
        for (int64_t w = 0; w < W_; ++w) {
            const float so_far = item.live[size_t(w)];
            if (so_far == NEVER) continue;
            float* row = logits + w * V_;
            decoding().log_softmax(row, r_.mask.data, V_);
            for (int64_t v = 0; v < V_; ++v) {
                const float score = so_far + row[v];
                if (count == most && score <= item.best[size_t(count - 1)].score) continue;
                if (score == NEVER || v == early || (barred && barred[v] != 0.0f)) continue;
                int64_t at = count < most ? count++ : most - 1;
                for (; at > 0 && before(score, item.best[size_t(at - 1)].score); --at)
                    item.best[size_t(at)] = item.best[size_t(at - 1)];
                item.best[size_t(at)] = {score, w * V_ + v};
            }
        }
        return count;
    }

    // A finished hypothesis among the k best, behind those that are as good.
    void finish(Item& item, int64_t step, Candidate found) const {
        const float rank = r_.penalty == 0 ? found.score : float(found.score / std::pow(double(step), r_.penalty));
        auto& kept = item.finished;
        size_t at = kept.size();
        for (; at > 0 && (rank > kept[at - 1].rank || rank != rank); --at)
            if (at < kept.size()) kept[at] = kept[at - 1];
        if (at < kept.size()) kept[at] = {rank, found.score, step, found.code};
    }

    // One step of an item's search, as thalweg.inference.search.beam.search tells it; whether it was the last.
    bool advance(Item& item, int64_t step, float* logits) const {
        const int64_t count = choose(item, step, logits);
        const bool last = step == r_.max_length, final = last && r_.eos;
        if (final)  // here eos alone makes a hypothesis, wherever it stands
            for (int64_t w = 0; w < W_; ++w)
                if (item.live[size_t(w)] > NEVER)
                    item.dropped = std::max(item.dropped, item.live[size_t(w)] + logits[w * V_ + eos_]);
        int64_t kept = 0;
        for (int64_t n = 0; n < count; ++n) {
            const Candidate found = item.best[size_t(n)];
            const bool ends = r_.eos ? found.code % V_ == eos_ : last;
            if (ends && n < W_) {
                finish(item, step, found);
            } else if (!ends && kept < W_ && n < 2 * W_) {
                item.best[size_t(kept++)] = found;
            } else if (!final) {
                item.dropped = std::max(item.dropped, found.score);
            }
        }
        for (int64_t w = 0; w < W_; ++w) {
            // A dead slot follows the best row, so that the model is never asked about an impossible sequence.
            item.live[size_t(w)] = w < kept ? item.best[size_t(w)].score : NEVER;
            item.history.push_back(kept ? item.best[size_t(w < kept ? w : 0)].code : 0);
        }
        float bound = kept ? item.best[0].score : NEVER;
        if (r_.penalty != 0 && kept)
            bound = float(bound / std::pow(double(r_.penalty > 0 ? r_.max_length : step + 1), r_.penalty));
        return !(item.finished.back().rank < bound) || last;
    }

    // The rows of the next step: items that are done have none. `each` is how many an item had.
    void next_rows(int64_t step, int64_t each) {
        tokens_.clear(), parents_.clear(), sources_.clear();
        size_t left = 0;
        for (size_t slot = 0; slot < order_.size(); ++slot) {
            const int64_t n = order_[slot];
            const Item& item = items_[size_t(n)];
            if (item.ended) continue;
            order_[left++] = n;
            for (int64_t w = 0; w < W_; ++w) {
                const int64_t code = item.history[size_t((step - 1) * W_ + w)];
                tokens_.push_back(code % V_);
                parents_.push_back(int64_t(slot) * each + code / V_);
                sources_.push_back(n);
            }
        }
        order_.resize(left);
    }

    // Ctrl-C ends a search between two steps; asked for seldom, as the answer needs the interpreter's lock.
    void check_interrupt() {
        const auto now = std::chrono::steady_clock::now();
        if (now - asked_ < std::chrono::milliseconds(50)) return;
        nb::gil_scoped_acquire lock;
        if (PyErr_CheckSignals()) throw nb::python_error();
        asked_ = std::chrono::steady_clock::now();
    }

    const Request& r_;
    const int64_t W_, V_, eos_;
    std::vector<Item> items_;
    std::vector<int64_t> order_;  // items that are not done
    std::vector<int64_t> tokens_, parents_, sources_;
    Room logits_;
    std::chrono::steady_clock::time_point asked_ = std::chrono::steady_clock::now();
};

template <class T, size_t N>
struct Result {  // an array that Python will own
    std::array<size_t, N> shape;
    T* data;
    nb::capsule owner;

    Result(std::array<size_t, N> sizes, T value) : shape(sizes) {
        size_t count = 1;
        for (size_t size : sizes) count *= size;
        data = new T[count];
        owner = nb::capsule(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
        for (size_t k = 0; k < count; ++k) data[k] = value;
    }
    nb::object array() const { return nb::cast(nb::ndarray<nb::numpy, T>(data, N, shape.data(), owner)); }
};

nb::tuple Beam::answers() const {
    const size_t B = items_.size(), K = size_t(r_.k);
    Result<int64_t, 2> lengths({B, K}, 0);
    Result<float, 2> scores({B, K}, NEVER);
    Result<bool, 2> finished({B, K}, false);
    Result<bool, 1> optimal({B}, false);
    std::vector<int64_t> codes(B * K);
    int64_t longest = 0, wrong = -1, wrong_step = 0;
    for (size_t n = 0; n < B; ++n) {
        const Item& item = items_[n];
        if (wrong < 0 && !(item.live[0] < -NEVER && item.finished[0].rank < -NEVER))
            wrong = int64_t(n), wrong_step = item.ended;
        size_t spare = 0;  // what is missing is filled up with live rows, in order
        for (size_t k = 0; k < K; ++k) {
            const size_t at = n * K + k;
            const Finished& found = item.finished[k];
            if (found.score > NEVER) {
                finished.data[at] = true;
                scores.data[at] = found.score, lengths.data[at] = found.steps, codes[at] = found.code;
            } else if (spare < size_t(W_) && item.live[spare] > NEVER) {
                scores.data[at] = item.live[spare], lengths.data[at] = item.ended;
                codes[at] = item.history[size_t((item.ended - 1) * W_) + spare++];
            }
            longest = std::max(longest, lengths.data[at]);
        }
        optimal.data[n] = item.finished[0].rank >= item.dropped && finished.data[n * K] && r_.penalty == 0;
    }
    Result<int64_t, 3> tokens({B, K, size_t(longest)}, -1);
    for (size_t at = 0; at < B * K; ++at) {
        int64_t code = codes[at];
        for (int64_t s = lengths.data[at] - 1; s >= 0; --s) {
            tokens.data[int64_t(at) * longest + s] = code % V_;
            if (s) code = items_[at / K].history[size_t((s - 1) * W_ + code / V_)];
        }
    }
    return nb::make_tuple(tokens.array(), lengths.array(), scores.array(), finished.array(), optimal.array(), wrong,
                          wrong_step);
}

}  // namespace

void Request::check() const {
    const int64_t symbols = mask.shape[0];
    if (width < 1 || k < 1 || max_length < 1 || symbols < 1)
        throw ShapeError("a search needs at least one row, one answer, one step and one symbol");
    if (width > 1 << 24 || k > 1 << 24 || max_length > 1 << 30)
        throw ShapeError(said("a search of ", width, " rows, ", k, " answers and ", max_length, " steps has no room"));
    for (int64_t symbol : {bos, eos.value_or(bos)})
        if (symbol < 0 || symbol >= symbols)
            throw ShapeError(said("`bos` and `eos` must lie in 0..", symbols - 1, ", got ", symbol));
    if (barred) expect_width("barred", barred->shape[0], symbols);
}

void Request::expect_symbols(const Kept<2>& embedding, const Linear& output) const {
    expect_width("output", output.outer(), mask.shape[0]);
    if (embedding.shape[0] < mask.shape[0]) throw ShapeError("the embedding must have a row for every symbol");
}

std::vector<int64_t> starts_of(Array<const int64_t, 1> lengths, int64_t most) {
    std::vector<int64_t> starts{0};
    expect_range("lengths", lengths, 1, most + 1);
    for (int64_t n = 0; n < lengths.shape[0]; ++n) starts.push_back(starts.back() + lengths.data[n]);
    return starts;
}

nb::tuple search(const Request& request, int64_t items, const std::function<std::unique_ptr<Steps>()>& begin) {
    std::unique_ptr<Beam> beam;
    {
        nb::gil_scoped_release free;
        const auto steps = begin();
        beam = std::make_unique<Beam>(request, items);
        beam->run(*steps);
    }
    return beam->answers();
}

void add_search(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<Request>(m, "Request", "What is asked of a search.")
        .def("__init__",
             &init<Request, int64_t, int64_t, int64_t, int64_t, double, int64_t, std::optional<int64_t>, Kept<1>,
                   std::optional<Kept<1>>, int>,
             nb::kw_only(), "width"_a, "k"_a, "max_length"_a, "min_length"_a, "penalty"_a, "bos"_a, "eos"_a, "mask"_a,
             "barred"_a, "threads"_a)
        .def_ro("max_length", &Request::max_length);
}

}  // namespace thalweg
