// Decoders with hard monotonic attention, searched from what their encoder gave. Where the reader is is summed out: a
// row keeps, for each place of its source, the probability of being there and those of all symbols if it is.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "cells.h"

namespace thalweg {
namespace nb = nanobind;
namespace {

// No probability is below it, so that logarithms stay finite.
constexpr float LEAST = std::numeric_limits<float>::min();

struct Monotonic {
    std::string cell;
    Kept<2> target_embedding;
    std::vector<Cell> decoder;
    Linear join;    // what the joining network reads of a state; its reading of the source comes with the sources
    Linear pull;    // of each place: a score, or with `walks` those of staying and of skipping
    SomeMap jumps;  // scores of lengths 0 ... J - 1 of a jump, the last of all longer ones too
    Linear output;
    bool walks;

    int64_t hidden() const { return decoder[0].past.inner(); }
    void check() const {
        if (decoder.empty()) throw ShapeError("a decoder needs a layer");
        const int64_t H = hidden();
        for (size_t n = 0; n < decoder.size(); ++n)
            decoder[n].expect(kind_of(cell), n ? H : target_embedding.shape[1], H);
        join.expect("join", H, H);
        pull.expect("pull", H, walks ? 2 : 1);
        if (walks && jumps) throw ShapeError("a reader who walks has no `jumps`");
        if (jumps) jumps->expect("jumps", H, jumps->outer());
        if (jumps && jumps->outer() < 1) throw ShapeError("`jumps` must score one length at least");
        expect_width("output", output.inner(), H);
    }
};

struct Sources {
    Array<const int64_t, 1> lengths;  // (B,) places of each source, its end included
    Array<const float, 2> memory;     // (N, H) of all places, one source after the other
    Kept<1> never;                    // (V,) is added to the scores of symbols at a place
    std::vector<int64_t> starts{};

    void check(const Monotonic& model, const Request& request) {
        starts = starts_of(lengths, memory.shape[0]);
        expect("memory", memory, {starts.back(), model.hidden()});
        expect_width("never", never.shape[0], model.output.outer());
        request.expect_symbols(model.target_embedding, model.output);
    }
};

class Reader : public Steps {
  public:
    Reader(const Monotonic& model, const Sources& sources, const Request& request)
        : model_(model), s_(sources), threads_(request.threads), H_(model.hidden()), V_(model.output.outer()),
          J_(model.jumps ? model.jumps->outer() : 0),
          S_(lengths_max(sources)), rows_(sources.lengths.shape[0] * request.width),
          stack_(kind_of(model.cell), model.decoder, model.target_embedding, rows_, threads_), own_(rows_ * H_),
          now_(rows_ * S_ * (V_ + 1)), before_(rows_ * S_ * (V_ + 1)) {}

    void step(const Rows& rows, float* logits) override {
        const float* h = stack_.step(rows);
        model_.join(h, rows.count, own_, threads_);
        std::swap(now_, before_);
        auto one = [&](int64_t r, void* memory) { look(rows, r, static_cast<float*>(memory), logits + r * V_); };
        each_row(rows.count, double(S_) * (30 * H_ + 2 * H_ * V_ + 20 * V_), threads_, one,
                 S_ * (H_ + 4 + J_) * int64_t(sizeof(float)));
    }

  private:
    static int64_t lengths_max(const Sources& s) {
        const int64_t count = s.lengths.shape[0];
        return count ? *std::max_element(s.lengths.data, s.lengths.data + count) : 1;
    }

    // Of a row: the logarithms (S,) of being at a place, and (S, V) of the symbols there.
    float* at(const Room& kept, int64_t row) const { return kept + row * S_ * (V_ + 1); }

    void look(const Rows& rows, int64_t r, float* z, float* logits) {
        const int64_t item = rows.items[r], count = s_.lengths.data[item];
        const float* memory = s_.memory.data + s_.starts[size_t(item)] * H_;
        float *belief = z + S_ * H_, *pulls = belief + S_, *jumps = pulls + 2 * S_, *weights = jumps + S_ * J_;
        believe(rows, r, count, belief);
        for (int64_t s = 0; s < count; ++s)
            for (int64_t i = 0; i < H_; ++i) z[s * H_ + i] = own_[r * H_ + i] + memory[s * H_ + i];
        decoding().tanh(z, count * H_);
        float *places = at(now_, r), *symbols = places + S_;
        model_.pull(z, count, pulls, 1);
        if (model_.jumps) (*model_.jumps)(z, count, jumps, 1);
        if (model_.walks) walk(belief, pulls, count, places);
        else leap(belief, pulls, jumps, weights, count, places);
        model_.output(z, count, symbols, 1);
        for (int64_t s = 0; s < count; ++s) decoding().log_softmax(symbols + s * V_, s_.never.data, V_);
        decoding().mixture(places, symbols, count, V_, logits);
    }

    // Probabilities of having been at each place before this step, beside the highest: logits may have any sum.
    void believe(const Rows& rows, int64_t r, int64_t count, float* belief) const {
        std::fill_n(belief, count, 0.0f);
        if (!rows.step) return void(belief[0] = 1.0f);
        const float *places = at(before_, rows.parents[r]), *symbols = places + S_ + rows.tokens[r];
        float top = -std::numeric_limits<float>::infinity();
        for (int64_t s = 0; s < count; ++s) top = std::max(top, belief[s] = places[s] + symbols[s * V_]);
        for (int64_t s = 0; s < count; ++s) belief[s] = std::exp(belief[s] - top);
    }

    // p(j | i) ~ exp(pull_j + jump_i(j - i)) for j >= i.
    void leap(const float* belief, const float* pulls, const float* jumps, float* weights, int64_t count,
              float* places) const {
        std::fill_n(places, count, 0.0f);
        for (int64_t i = 0; i < count; ++i) {
            if (belief[i] == 0.0f) continue;
            auto score = [&](int64_t j) { return J_ ? pulls[j] + jumps[i * J_ + std::min(j - i, J_ - 1)] : pulls[j]; };
            float top = score(i), total = 0.0f;
            for (int64_t j = i + 1; j < count; ++j) top = std::max(top, score(j));
            for (int64_t j = i; j < count; ++j) total += weights[j] = std::exp(score(j) - top);
            for (int64_t j = i; j < count; ++j) places[j] += belief[i] / total * weights[j];
        }
        for (int64_t j = 0; j < count; ++j) places[j] = std::log(std::max(places[j], LEAST));
    }

    // Stays where it is, or steps on and stops at the first place that it does not skip.
    static void walk(const float* belief, const float* pulls, int64_t count, float* places) {
        auto yes = [](float score) { return 1.0f / (1.0f + std::exp(-score)); };
        float coming = 0.0f;  // of those who have left, and skipped all places so far
        for (int64_t j = 0; j < count; ++j) {
            const bool last = j == count - 1;
            const float stays = last ? 1.0f : yes(pulls[2 * j]), skips = last ? 0.0f : yes(pulls[2 * j + 1]);
            places[j] = std::log(std::max(belief[j] * stays + coming * (1.0f - skips), LEAST));
            coming = coming * skips + belief[j] * (1.0f - stays);
        }
    }

    const Monotonic& model_;
    const Sources& s_;
    const int threads_;
    const int64_t H_, V_, J_, S_, rows_;  // S: of the longest source; rows that there is room for
    Stack stack_;
    Room own_, now_, before_;
};

}  // namespace

void add_monotonic(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<Monotonic>(m, "Monotonic", "A decoder with hard monotonic attention, ready to be searched.")
        .def("__init__",
             &init<Monotonic, std::string, Kept<2>, std::vector<Cell>, Linear, Linear, SomeMap, Linear, bool>,
             nb::kw_only(), "cell"_a, "target_embedding"_a, "decoder"_a, "join"_a, "pull"_a, "jumps"_a, "output"_a,
             "walks"_a)
        .def("search", [](const Monotonic& self, const Request& request, Array<const int64_t, 1> lengths,
                          Array<const float, 2> memory, Kept<1> never) {
                Sources sources{lengths, memory, never};
                sources.check(self, request);
                return search(request, lengths.shape[0], [&] { return std::make_unique<Reader>(self, sources, request); });
            },
            "request"_a, nb::kw_only(), "lengths"_a, "memory"_a, "never"_a);
}

}  // namespace thalweg
