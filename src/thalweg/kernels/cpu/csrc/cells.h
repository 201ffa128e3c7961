// Recurrent layers, and a decoder's stack of them as it takes its steps.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "search.h"

namespace thalweg {

CellKind kind_of(const std::string& name);

// A layer in one direction: what its gates read of the input and of the last state; a GRU that resets before its
// product has a second one.
struct Cell {
    Linear input, past;
    SomeMap candidate;

    void expect(CellKind kind, int64_t inputs, int64_t hidden) const;
};

// One step of so many rows, whose states change in place; x(r) is what the gates read of the input of row r. `past` and
// `weighed` are room for (rows, gates) and (rows, hidden).
template <class Input>
void advance(CellKind kind, const Cell& cell, int64_t rows, Input x, float* h, float* c, float* past, float* weighed,
             int threads) {
    const int64_t H = cell.past.inner(), G = cell.input.outer();
    cell.past(h, H, rows, past, G, threads);
    if (cell.candidate) {
        each_row(rows, 30.0 * H, threads,
                 [&](int64_t r) { decoding().reset(x(r), past + r * G, h + r * H, weighed + r * H, H); });
        (*cell.candidate)(weighed, H, rows, past + 2 * H, G, threads);
    }
    each_row(rows, 60.0 * H, threads,
             [&](int64_t r) { decoding().cell(kind, x(r), past + r * G, h + r * H, c ? c + r * H : nullptr, H); });
}

// What a layer makes of symbols, computed when a symbol first comes up.
class Looked {
  public:
    Looked(const Linear& map, const Kept<2>& embedding)
        : map_(map), embedding_(embedding), known_(size_t(embedding.shape[0])) {}

    void need(const int64_t* symbols, int64_t count, int threads);
    const float* operator()(int64_t symbol) const { return known_[size_t(symbol)]; }

  private:
    const Linear& map_;
    const Kept<2>& embedding_;
    std::vector<const float*> known_;
    std::vector<Room> found_;
};

// A decoder's layers, and the states of its rows. They are nothing before the first step unless someone writes them.
class Stack {
  public:
    Stack(CellKind kind, const std::vector<Cell>& cells, const Kept<2>& embedding, int64_t rows, int threads);

    float* state(size_t kind, int64_t layer) { return states_[kind].first + layer * rows_ * H_; }
    // Feeds every row its symbol; the states of the last layer.
    const float* step(const Rows& rows);

  private:
    const CellKind kind_;
    const std::vector<Cell>& cells_;
    const int64_t rows_, H_, G_;  // rows that there is room for
    const int threads_;
    Looked table_;
    Room past_, fed_, weighed_;
    std::vector<std::pair<Room, Room>> states_;  // (layers, rows, H) now and before, of h and of c
};

}  // namespace thalweg
