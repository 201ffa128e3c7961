// Greedy and beam search over any decoder that can take a step with many rows.
#pragma once

#include <functional>
#include <vector>

#include "layers.h"

namespace thalweg {

// What is asked of a search.
struct Request {
    int64_t width, k, max_length, min_length;  // rows and answers an item; most and least symbols
    double penalty;                            // scores are divided by length^penalty before they are compared
    int64_t bos;
    std::optional<int64_t> eos;     // none: all answers are of max_length
    Kept<1> mask;                   // (V,) is added to logits
    std::optional<Kept<1>> barred;  // (V,) not 0 at symbols that are never said; their probability goes to nobody
    int threads;

    void check() const;
    // A model's embedding and output must be those of all symbols.
    void expect_symbols(const Kept<2>& embedding, const Linear& output) const;
};

// The rows of a step: what each is fed, the row of the step before that it continues, and its item. In the first step
// row n is the one row of item n, and its parent is n.
struct Rows {
    int64_t step, count;
    const int64_t *tokens, *parents, *items;
};

class Steps {
  public:
    virtual ~Steps() = default;
    // Feeds every row its symbol; logits (rows, V) of the next ones.
    virtual void step(const Rows& rows, float* logits) = 0;
};

// Where each of the sources begins, of at most so many places, that lie one after the other, and the end of all.
std::vector<int64_t> starts_of(Array<const int64_t, 1> lengths, int64_t most);

// Searches from the first step on, without the interpreter's lock and interruptible. Gives tokens (B, k, T), lengths,
// scores, finished (B, k), optimal (B,), and the first item whose probabilities are no numbers with its step, or -1.
nanobind::tuple search(const Request& request, int64_t items, const std::function<std::unique_ptr<Steps>()>& begin);

}  // namespace thalweg
