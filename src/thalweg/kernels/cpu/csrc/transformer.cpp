// Transformers with encoder and decoder, searched from the embedded sources to the last symbol.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstring>
#include <string>

#include "search.h"

namespace thalweg {
namespace nb = nanobind;
namespace {

// A layer. The norms are those that follow the sums: its own where norms come after, the next block's where before.
struct Block {
    Linear project, out;  // self-attention: queries, keys and values side by side
    Norm attention_norm;
    SomeMap query, cross_out;  // of the sources, in a decoder
    SomeNorm cross_norm;
    Linear up;
    SomeMap gate;
    Linear down;
    Norm feedforward_norm;
};

Activation activation_of(const std::string& name) {
    if (name == "relu") return Activation::relu;
    if (name == "gelu") return Activation::gelu;
    if (name == "geglu") return Activation::gelu_tanh;
    if (name == "silu" || name == "swiglu") return Activation::silu;
    throw ShapeError(said("`activation` is not known: ", name));
}

struct Transformer {
    int64_t heads;
    std::string activation;
    std::vector<Block> encoder, decoder;    // no encoder: its memories are given to each search
    SomeNorm encoder_first, decoder_first;  // where norms come first: that of the first block
    std::vector<Linear> memory;             // of each decoder layer: keys and values of the encoder's outputs
    Kept<2> embedding;
    float scale;  // of embedded symbols
    SomeNorm embedding_norm;
    SomeMap head;  // before the output: a linear map, gelu, a norm
    SomeNorm head_norm;
    Linear output;

    int64_t width() const { return embedding.shape[1]; }
    int64_t attention() const { return decoder[0].out.inner(); }
    int64_t inner() const { return decoder[0].down.inner(); }
    void check() const;
    void check_blocks(const std::vector<Block>& blocks, bool cross) const;
};

void Transformer::check_blocks(const std::vector<Block>& blocks, bool cross) const {
    const int64_t D = width(), A = attention(), F = inner();
    for (const Block& block : blocks) {
        block.project.expect("project", D, 3 * A);
        block.out.expect("out", A, D);
        block.up.expect("up", D, F);
        block.down.expect("down", F, D);
        if (block.gate) block.gate->expect("gate", D, F);
        expect_width("attention_norm", block.attention_norm.width(), D);
        expect_width("feedforward_norm", block.feedforward_norm.width(), D);
        if (!cross) continue;
        if (!block.query || !block.cross_out || !block.cross_norm)
            throw ShapeError("a layer of a decoder needs the parts of cross-attention");
        block.query->expect("query", D, A);
        block.cross_out->expect("cross_out", A, D);
        expect_width("cross_norm", block.cross_norm->width(), D);
    }
}

void Transformer::check() const {
    activation_of(activation);
    if (decoder.empty()) throw ShapeError("a Transformer needs a layer at least");
    const int64_t D = width(), A = attention();
    if (heads < 1 || A % heads) throw ShapeError(said("`heads` must divide the width ", A, ", got ", heads));
    check_blocks(encoder, false);
    check_blocks(decoder, true);
    for (const SomeNorm& norm : {encoder_first, decoder_first, embedding_norm, head_norm})
        if (norm) expect_width("norm", norm->width(), D);
    if (!encoder.empty() && memory.size() != decoder.size()) throw ShapeError("`memory` needs a map for each layer");
    for (const Linear& map : memory) map.expect("memory", D, 2 * A);
    if (head) head->expect("head", D, D);
    if (head.has_value() != head_norm.has_value()) throw ShapeError("`head` and `head_norm` belong together");
    expect_width("output", output.inner(), D);
}

using Table = std::optional<Kept<2>>;

// The sources of a search, their places one after the other, and tables that reach as far as its steps.
struct Sources {
    Array<const int64_t, 1> lengths;                   // (B,)
    Table inputs;                                      // (N, D) embedded symbols, or else
    std::vector<Kept<2>> memories;                     // (N, 2 A) for each layer of the decoder
    std::optional<Array<const int64_t, 1>> positions;  // (N,) rows of the rotary tables
    Table vectors, cosines, sines, distances;
    std::vector<int64_t> starts{};  // of each source, and the end of all

    void check(const Transformer& model, const Request& request);
};

void Sources::check(const Transformer& model, const Request& request) {
    const int64_t D = model.width(), A = model.attention(), steps = request.max_length, half = A / model.heads / 2;
    auto reach = [](const char* name, const Table& given, int64_t rows, int64_t width) {
        if (!given) return;
        expect_width(name, given->shape[1], width);
        if (given->shape[0] < rows) throw ShapeError(said("`", name, "` must reach ", rows, ", got ", given->shape[0]));
    };
    if (inputs.has_value() == model.encoder.empty() || memories.size() != (inputs ? 0 : model.decoder.size()))
        throw ShapeError("a search needs embedded sources, or the memories of every layer where there is no encoder");
    starts = starts_of(lengths, inputs ? inputs->shape[0] : memories[0].shape[0]);
    const int64_t places = starts.back();
    reach("inputs", inputs, places, D);
    for (const Kept<2>& memory : memories) reach("memories", memory, places, 2 * A);
    reach("vectors", vectors, steps, D);
    reach("cosines", cosines, steps, half);
    reach("sines", sines, steps, half);
    if (cosines.has_value() != sines.has_value() || (cosines && cosines->shape[0] != sines->shape[0]))
        throw ShapeError("`cosines` and `sines` belong together");
    if (cosines && inputs) {
        if (!positions) throw ShapeError("rotary positions need `positions`");
        expect("positions", *positions, {places});
        expect_range("positions", *positions, 0, cosines->shape[0]);
    }
    if (distances && (distances->shape[0] != model.heads || distances->shape[1] < steps))
        throw ShapeError(said("`distances` must be (", model.heads, ", ", steps, ") at least"));
    request.expect_symbols(model.embedding, model.output);
}

constexpr int64_t PAD = 16;  // numbers between wide rows: rows a power of two apart would share few places of a cache

// What the blocks of one side read and write, for so many rows.
struct Stream {
    const Activation activation;
    const int threads;
    const int64_t A, D, F;
    Room h, own, projected, read, change, inner, gate;
    float* sum;  // what blocks add to: h is its norm, or the same where norms come after

    Stream(const Transformer& model, bool norm_first, int64_t rows, int threads)
        : activation(activation_of(model.activation)), threads(threads), A(model.attention()), D(model.width()),
          F(model.inner()), h(rows * D), own(norm_first ? rows * D : 0), projected(rows * 3 * A), read(rows * A),
          change(rows * D), inner(rows * (F + PAD)), gate(rows * (F + PAD)), sum(norm_first ? own : h) {}

    // What `map` makes of `from` is added to the stream; h is the norm of the sum.
    void add(const Linear& map, const float* from, int64_t from_row, const Norm& norm, int64_t rows) {
        map(from, from_row, rows, change, D, threads);
        norm(change, sum, rows, sum, h, threads);
    }
    void feed_forward(const Block& block, int64_t rows) {
        const int64_t apart = F + PAD;
        float* active = block.gate ? gate : inner;
        block.up(h, D, rows, inner, apart, threads);
        if (block.gate) (*block.gate)(h, D, rows, gate, apart, threads);
        each_row(rows, 10.0 * F, threads, [&](int64_t r) {
            decoding().activate(activation, active + r * apart, block.gate ? inner + r * apart : nullptr, F);
        });
        add(block.down, active, apart, block.feedforward_norm, rows);
    }
    // h = norm(gelu(map h)).
    void transform(const Linear& map, const Norm& norm, int64_t rows) {
        map(h, rows, change, threads);
        each_row(rows, 10.0 * D, threads,
                 [&](int64_t r) { decoding().activate(Activation::gelu, change + r * D, nullptr, D); });
        norm(change, nullptr, rows, change, h, threads);
    }
};

class Decoder : public Steps {
  public:
    Decoder(const Transformer& model, const Sources& sources, const Request& request)
        : model_(model), s_(sources), threads_(request.threads), size_(model.attention() / model.heads),
          stream_(model, model.decoder_first.has_value(), request.width * sources.lengths.shape[0], threads_) {
        for (size_t n = 0; n + 1 < s_.starts.size(); ++n) longest_ = std::max(longest_, sources.lengths.data[n]);
        for (const Kept<2>& memory : sources.memories) memories_.push_back(memory.data);
        if (!model.encoder.empty()) encode();
    }

    void step(const Rows& rows, float* logits) override {
        const int64_t R = rows.count, A = stream_.A;
        inherit(rows);
        embed(rows);
        if (model_.decoder_first) (*model_.decoder_first)(stream_.sum, nullptr, R, stream_.sum, stream_.h, threads_);
        for (size_t n = 0; n < model_.decoder.size(); ++n) {
            const Block& block = model_.decoder[n];
            block.project(stream_.h, R, stream_.projected, threads_);
            attend_past(rows, n);
            stream_.add(block.out, stream_.read, A, block.attention_norm, R);
            (*block.query)(stream_.h, R, stream_.projected, threads_);
            attend_source(R, stream_.projected, A, memories_[n], 2 * A, rows.items, stream_.read);
            stream_.add(*block.cross_out, stream_.read, A, *block.cross_norm, R);
            stream_.feed_forward(block, R);
        }
        if (model_.head) stream_.transform(*model_.head, *model_.head_norm, R);
        model_.output(stream_.h, R, logits, threads_);
    }

  private:
    // Attention of rows over at most so many places; keys(r, to) writes down where the keys of row r lie, each with its
    // value A numbers on, and says how many there are.
    template <class Keys>
    void attend(int64_t rows, int64_t most, const float* queries, int64_t query_row, const Table& distances, float* out,
                Keys keys) const {
        const int64_t A = stream_.A;
        const Attention how{model_.heads, size_, 1.0f / std::sqrt(float(size_)), distances ? distances->data : nullptr,
                            distances ? distances->shape[1] : 0};
        auto one = [&](int64_t r, void* memory) {
            auto** places = static_cast<const float**>(memory);
            const int64_t count = keys(r, places);
            auto* scores = reinterpret_cast<float*>(places + most);
            decoding().attend(how, queries + r * query_row, places, count, A, scores, out + r * A);
        };
        each_row(rows, 4.0 * most * A, threads_, one, most * int64_t(sizeof(float*) + model_.heads * sizeof(float)));
    }

    // Over the places of the rows' sources: keys and values lie side by side in `memory`.
    void attend_source(int64_t rows, const float* queries, int64_t query_row, const float* memory, int64_t memory_row,
                       const int64_t* items, float* out) const {
        attend(rows, longest_, queries, query_row, {}, out, [&](int64_t r, const float** keys) {
            const int64_t first = s_.starts[size_t(items[r])], count = s_.lengths.data[items[r]];
            for (int64_t s = 0; s < count; ++s) keys[s] = memory + (first + s) * memory_row;
            return count;
        });
    }

    // Over the rows' own pasts in layer n, which this step joins.
    void attend_past(const Rows& rows, size_t n) {
        const int64_t R = rows.count, A = stream_.A, steps = rows.step + 1;
        each_row(R, 8.0 * A, threads_, [&](int64_t r) {
            float* projected = stream_.projected + r * 3 * A;
            rotate(projected, rows.step);
            std::memcpy(cached(rows.step, n, r), projected + A, size_t(2 * A) * sizeof(float));
        });
        attend(R, steps, stream_.projected, 3 * A, s_.distances, stream_.read, [&](int64_t r, const float** keys) {
            for (int64_t s = 0; s < steps; ++s) keys[s] = cached(s, n, lineage_[size_t(r * steps + s)]);
            return steps;
        });
    }

    void rotate(float* queries_and_keys, int64_t position) const {
        if (s_.cosines)
            decoding().rotate(queries_and_keys, 2 * model_.heads, size_, s_.cosines->data + position * (size_ / 2),
                              s_.sines->data + position * (size_ / 2));
    }

    void encode() {
        const int64_t N = s_.starts.back(), A = stream_.A, D = stream_.D;
        Stream stream(model_, model_.encoder_first.has_value(), N, threads_);
        std::vector<int64_t> items;  // of every place
        for (int64_t n = 0; n < s_.lengths.shape[0]; ++n) items.insert(items.end(), size_t(s_.lengths.data[n]), n);
        std::memcpy(stream.sum, s_.inputs->data, size_t(N * D) * sizeof(float));
        if (model_.encoder_first) (*model_.encoder_first)(stream.sum, nullptr, N, stream.sum, stream.h, threads_);
        for (const Block& block : model_.encoder) {
            block.project(stream.h, N, stream.projected, threads_);
            if (s_.cosines)
                each_row(N, 4.0 * A, threads_,
                         [&](int64_t p) { rotate(stream.projected + p * 3 * A, s_.positions->data[p]); });
            attend_source(N, stream.projected, 3 * A, stream.projected + A, 3 * A, items.data(), stream.read);
            stream.add(block.out, stream.read, A, block.attention_norm, N);
            stream.feed_forward(block, N);
        }
        for (const Linear& map : model_.memory) {
            memories_.push_back(own_memories_.emplace_back(N * 2 * A));
            map(stream.h, N, own_memories_.back(), threads_);
        }
    }

    // lineage (rows, step + 1): the rows that a row and its ancestors had. The caches stay where they are.
    void inherit(const Rows& rows) {
        const int64_t t = rows.step;
        std::vector<int64_t> lineage(size_t(rows.count * (t + 1)));
        for (int64_t r = 0; r < rows.count; ++r) {
            std::copy_n(lineage_.data() + rows.parents[r] * t, t, lineage.data() + r * (t + 1));
            lineage[size_t(r * (t + 1) + t)] = r;
        }
        lineage_.swap(lineage);
        caches_.emplace_back(rows.count * 2 * stream_.A * int64_t(model_.decoder.size()));
        held_.push_back(rows.count);
    }

    void embed(const Rows& rows) {
        const int64_t D = stream_.D;
        const float* vector = s_.vectors ? s_.vectors->data + rows.step * D : nullptr;
        for (int64_t r = 0; r < rows.count; ++r) {
            const float* from = model_.embedding.data + rows.tokens[r] * D;
            for (int64_t i = 0; i < D; ++i)
                stream_.sum[r * D + i] = from[i] * model_.scale + (vector ? vector[i] : 0.0f);
        }
        if (model_.embedding_norm)
            (*model_.embedding_norm)(stream_.sum, nullptr, rows.count, stream_.sum, stream_.sum, threads_);
    }

    // Keys and values of row r of step s in layer n.
    float* cached(int64_t s, size_t n, int64_t r) const {
        return caches_[size_t(s)] + (int64_t(n) * held_[size_t(s)] + r) * 2 * stream_.A;
    }

    const Transformer& model_;
    const Sources& s_;
    const int threads_;
    const int64_t size_;   // of a head
    int64_t longest_ = 1;  // source
    Stream stream_;
    std::vector<const float*> memories_;
    std::vector<Room> own_memories_, caches_;
    std::vector<int64_t> held_, lineage_;  // rows of each step; see `inherit`
};

}  // namespace

void add_transformer(nb::module_& m) {
    using namespace nb::literals;
    using Blocks = std::vector<Block>;
    nb::class_<Block>(m, "Block", "A layer of a Transformer, with the norms that follow its sums.")
        .def(nb::init<Linear, Linear, Norm, SomeMap, SomeMap, SomeNorm, Linear, SomeMap, Linear, Norm>(), nb::kw_only(),
             "project"_a, "out"_a, "attention_norm"_a, "query"_a, "cross_out"_a, "cross_norm"_a, "up"_a, "gate"_a,
             "down"_a, "feedforward_norm"_a);
    nb::class_<Transformer>(m, "Transformer", "A Transformer with encoder and decoder, ready to be searched.")
        .def("__init__",
             &init<Transformer, int64_t, std::string, Blocks, Blocks, SomeNorm, SomeNorm, std::vector<Linear>, Kept<2>,
                   float, SomeNorm, SomeMap, SomeNorm, Linear>,
             nb::kw_only(), "heads"_a, "activation"_a, "encoder"_a, "decoder"_a, "encoder_first"_a, "decoder_first"_a,
             "memory"_a, "embedding"_a, "scale"_a, "embedding_norm"_a, "head"_a, "head_norm"_a, "output"_a)
        .def("search", [](const Transformer& self, const Request& request, Array<const int64_t, 1> lengths, Table inputs,
                          std::vector<Kept<2>> memories, std::optional<Array<const int64_t, 1>> positions, Table vectors,
                          Table cosines, Table sines, Table distances) {
                Sources sources{lengths, inputs, memories, positions, vectors, cosines, sines, distances};
                sources.check(self, request);
                return search(request, lengths.shape[0], [&] { return std::make_unique<Decoder>(self, sources, request); });
            },
            "request"_a, nb::kw_only(), "lengths"_a, "inputs"_a, "memories"_a, "positions"_a, "vectors"_a, "cosines"_a,
            "sines"_a, "distances"_a);
}

}  // namespace thalweg
