// Recurrent encoder-decoders (LSTM, GRU) with attention, searched from the symbols of the sources to the last one.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "cells.h"

namespace thalweg {
namespace nb = nanobind;
namespace {

struct Recurrent {
    std::string cell;
    Kept<2> source_embedding, target_embedding;
    std::vector<std::vector<Cell>> encoder;  // the directions of every layer
    std::vector<Cell> decoder;
    std::vector<Linear> bridge;  // from the encoder's last states to the decoder's first; none: they are the same
    SomeMap own, values;         // what the output reads of the new state, and of what attention finds
    SomeMap keys, query;         // none: keys are the encoder's outputs, queries the states
    bool folded;                 // the encoder's directions are added before they are attended to
    Linear output;

    int64_t hidden() const { return decoder[0].past.inner(); }
    int64_t gates() const { return decoder[0].input.outer(); }
    int64_t directions() const { return int64_t(encoder[0].size()); }
    int64_t states() const { return cell == "lstm" ? 2 : 1; }
    void check() const;
};

void Recurrent::check() const {
    if (encoder.empty() || decoder.empty()) throw ShapeError("a recurrent model needs a layer on each side");
    const CellKind kind = kind_of(cell);
    const int64_t H = hidden(), D = directions();
    for (size_t n = 0; n < encoder.size(); ++n) {
        if (D < 1 || D > 2 || int64_t(encoder[n].size()) != D)
            throw ShapeError("every layer of an encoder has the same one or two directions");
        for (const Cell& side : encoder[n]) side.expect(kind, n ? D * H : source_embedding.shape[1], H);
    }
    for (size_t n = 0; n < decoder.size(); ++n) decoder[n].expect(kind, n ? H : target_embedding.shape[1], H);
    const int64_t last = int64_t(encoder.size()) * D * H, first = int64_t(decoder.size()) * H;
    if (bridge.empty() ? last != first : int64_t(bridge.size()) != states())
        throw ShapeError("`bridge` must map every kind of state");
    for (const Linear& map : bridge) map.expect("bridge", last, first);
    const int64_t memory = folded ? H : D * H, out = own ? own->outer() : H;
    if (folded && D != 2) throw ShapeError("`folded` needs two directions");
    if (own) expect_width("own", own->inner(), H);
    if (values) {
        if (!own) throw ShapeError("`values` needs `own`");
        values->expect("values", memory, out);
        if (keys) keys->expect("keys", memory, H);
        else expect_width("keys", memory, H);
        if (query) query->expect("query", H, H);
    }
    expect_width("output", output.inner(), out);
}

struct Sources {
    Array<const int64_t, 1> lengths, tokens;  // (B,), and all symbols one after the other
    std::optional<Kept<1>> weights;           // of the additive score
    std::vector<int64_t> starts{};            // of each source, and the end of all

    void check(const Recurrent& model, const Request& request) {
        starts = starts_of(lengths, tokens.shape[0]);
        expect("tokens", tokens, {starts.back()});
        expect_range("tokens", tokens, 0, model.source_embedding.shape[0]);
        if (weights) expect_width("weights", weights->shape[0], model.hidden());
        request.expect_symbols(model.target_embedding, model.output);
    }
};

class Decoder : public Steps {
  public:
    Decoder(const Recurrent& model, const Sources& sources, const Request& request)
        : model_(model), s_(sources), kind_(kind_of(model.cell)), threads_(request.threads), H_(model.hidden()),
          G_(model.gates()), items_(sources.lengths.shape[0]), rows_(items_ * request.width),
          stack_(kind_, model.decoder, model.target_embedding, rows_, threads_), query_(rows_ * H_) {
        if (model.own) own_ = Room(rows_ * model.own->outer()), read_ = Room(rows_ * model.own->outer());
        encode();
        begin();
        remember();
    }

    void step(const Rows& rows, float* logits) override {
        const float* h = stack_.step(rows);
        if (model_.own) (*model_.own)(h, rows.count, own_, threads_);
        if (model_.values) attend(rows, h);
        model_.output(model_.values ? read_ : model_.own ? own_ : h, rows.count, logits, threads_);
    }

  private:
    void encode() {
        const int64_t N = s_.starts.back(), D = model_.directions(), wide = D * H_,
                      layers = int64_t(model_.encoder.size());
        for (int64_t k = 0; k < model_.states(); ++k) finals_.emplace_back(items_ * layers * wide);
        std::vector<int64_t> order(static_cast<size_t>(items_));  // longest first: those that go on stand together
        std::iota(order.begin(), order.end(), int64_t(0));
        std::stable_sort(order.begin(), order.end(),
                         [&](int64_t a, int64_t b) { return s_.lengths.data[a] > s_.lengths.data[b]; });
        for (int64_t n = 0; n < layers; ++n) {
            const std::vector<Cell>& sides = model_.encoder[size_t(n)];
            std::vector<Looked> looked;
            std::vector<Room> fed;
            for (const Cell& side : sides) {
                if (n) side.input(outputs_, N, fed.emplace_back(N * G_), threads_);
                else looked.emplace_back(side.input, model_.source_embedding).need(s_.tokens.data, N, threads_);
            }
            Room outputs(N * wide);
            // A thread takes some of the sources in one direction through all their places, so that nobody waits.
            const int64_t groups = std::max<int64_t>(1, std::min(items_ / 4, 2 * int64_t(threads_) / D));
            share(D * groups, threads_, [&](int64_t part) {
                const int64_t side = part % D, group = part / D;
                const int64_t low = items_ * group / groups, high = items_ * (group + 1) / groups;
                auto x = [&](int64_t place) {
                    return n ? fed[size_t(side)] + place * G_ : looked[size_t(side)](s_.tokens.data[place]);
                };
                run(sides[size_t(side)], side, order.data() + low, high - low, x, outputs + side * H_, wide,
                    (n * D + side) * H_);
            });
            std::swap(outputs_, outputs);
        }
    }

    // Some sources from their first symbols to their last, or the other way; `final` is where their last states go.
    template <class Input>
    void run(const Cell& cell, int64_t side, const int64_t* items, int64_t count, Input x, float* outputs, int64_t wide,
             int64_t final) const {
        const int64_t all = int64_t(model_.encoder.size()) * wide, states = model_.states();
        const Room past(count * G_), weighed(count * H_);
        std::vector<float> h(size_t(count * H_)), c(size_t(states > 1 ? count * H_ : 0));
        int64_t left = count;
        for (int64_t s = 0; left; ++s) {
            auto place = [&](int64_t r) {
                return side ? s_.starts[size_t(items[r]) + 1] - 1 - s : s_.starts[size_t(items[r])] + s;
            };
            auto own = [&](int64_t r) { return x(place(r)); };
            advance(kind_, cell, left, own, h.data(), c.empty() ? nullptr : c.data(), past, weighed, 1);
            for (int64_t r = 0; r < left; ++r) std::copy_n(h.data() + r * H_, H_, outputs + place(r) * wide);
            while (left && s_.lengths.data[items[left - 1]] == s + 1) --left;
        }
        for (int64_t r = 0; r < count; ++r)
            for (int64_t k = 0; k < states; ++k)
                std::copy_n((k ? c : h).data() + r * H_, H_, finals_[size_t(k)] + items[r] * all + final);
    }

    // The states before the first step.
    void begin() {
        const int64_t layers = int64_t(model_.decoder.size()), wide = layers * H_;
        for (size_t k = 0; k < finals_.size(); ++k) {
            if (!model_.bridge.empty()) {
                Room mapped(items_ * wide);
                model_.bridge[k](finals_[k], items_, mapped, threads_);
                std::swap(finals_[k], mapped);
                // A cell state is unbounded, a hidden state lives in (-1, 1).
                if (k == 0) decoding().tanh(finals_[k], items_ * wide);
            }
            for (int64_t n = 0; n < layers; ++n)
                for (int64_t r = 0; r < items_; ++r)
                    std::copy_n(finals_[k] + r * wide + n * H_, H_, stack_.state(k, n) + r * H_);
        }
    }

    // What attention reads of the encoder's outputs.
    void remember() {
        const int64_t N = s_.starts.back();
        if (!model_.values) return;
        if (model_.folded)
            for (int64_t p = 0; p < N; ++p)
                for (int64_t i = 0; i < H_; ++i)
                    outputs_[p * H_ + i] = outputs_[2 * p * H_ + i] + outputs_[(2 * p + 1) * H_ + i];
        values_ = Room(N * model_.values->outer());
        (*model_.values)(outputs_, N, values_, threads_);
        if (!model_.keys) return;
        Room keys(N * H_);
        (*model_.keys)(outputs_, N, keys, threads_);
        std::swap(outputs_, keys);
    }

    void attend(const Rows& rows, const float* h) {
        const int64_t wide = model_.own->outer(), longest = *std::max_element(s_.lengths.data, s_.lengths.data + items_);
        if (model_.query) (*model_.query)(h, rows.count, query_, threads_);
        const float* queries = model_.query ? query_ : h;
        const Reading how{s_.weights ? s_.weights->data : nullptr, H_, wide};
        auto one = [&](int64_t r, void* scores) {
            const int64_t item = rows.items[r], start = s_.starts[size_t(item)];
            decoding().read(how, queries + r * H_, outputs_ + start * H_, values_ + start * wide, s_.lengths.data[item],
                            own_ + r * wide, static_cast<float*>(scores), read_ + r * wide);
        };
        each_row(rows.count, double(longest) * ((s_.weights ? 30 : 2) * H_ + 2 * wide), threads_, one,
                 longest * int64_t(sizeof(float)));
    }

    const Recurrent& model_;
    const Sources& s_;
    const CellKind kind_;
    const int threads_;
    const int64_t H_, G_, items_, rows_;  // rows that there is room for
    Stack stack_;
    Room query_, own_, read_;
    std::vector<Room> finals_;  // (B, layers directions H): last states of the encoder
    Room outputs_, values_;     // of all places: what the encoder gave, later keys, and values
};

}  // namespace

void add_recurrent(nb::module_& m) {
    using namespace nb::literals;
    using Cells = std::vector<Cell>;
    nb::class_<Cell>(m, "Cell", "A recurrent layer in one direction.")
        .def(nb::init<Linear, Linear, SomeMap>(), nb::kw_only(), "input"_a, "past"_a, "candidate"_a);
    nb::class_<Recurrent>(m, "Recurrent", "A recurrent encoder-decoder, ready to be searched.")
        .def("__init__",
             &init<Recurrent, std::string, Kept<2>, Kept<2>, std::vector<Cells>, Cells, std::vector<Linear>, SomeMap,
                   SomeMap, SomeMap, SomeMap, bool, Linear>,
             nb::kw_only(), "cell"_a, "source_embedding"_a, "target_embedding"_a, "encoder"_a, "decoder"_a, "bridge"_a,
             "own"_a, "values"_a, "keys"_a, "query"_a, "folded"_a, "output"_a)
        .def("search", [](const Recurrent& self, const Request& request, Array<const int64_t, 1> lengths,
                          Array<const int64_t, 1> tokens, std::optional<Kept<1>> weights) {
                Sources sources{lengths, tokens, weights};
                sources.check(self, request);
                return search(request, lengths.shape[0], [&] { return std::make_unique<Decoder>(self, sources, request); });
            },
            "request"_a, nb::kw_only(), "lengths"_a, "tokens"_a, "weights"_a);
}

}  // namespace thalweg
