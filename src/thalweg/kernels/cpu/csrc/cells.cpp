#include "cells.h"

#include <algorithm>

namespace thalweg {

CellKind kind_of(const std::string& name) {
    if (name == "lstm") return CellKind::lstm;
    if (name == "gru") return CellKind::gru;
    if (name == "gru-reset-before") return CellKind::gru_reset_before;
    throw ShapeError(said("`cell` is not known: ", name));
}

void Cell::expect(CellKind kind, int64_t inputs, int64_t hidden) const {
    const bool before = kind == CellKind::gru_reset_before;
    const int64_t gates = (kind == CellKind::lstm ? 4 : 3) * hidden;
    input.expect("input", inputs, gates);
    past.expect("past", hidden, before ? 2 * hidden : gates);
    if (before != candidate.has_value())
        throw ShapeError("`candidate` belongs to cells that reset before their product");
    if (before) candidate->expect("candidate", hidden, hidden);
}

void Looked::need(const int64_t* symbols, int64_t count, int threads) {
    std::vector<int64_t> fresh;
    for (int64_t n = 0; n < count; ++n) {
        const float*& known = known_[size_t(symbols[n])];
        if (known) continue;
        known = embedding_.data;  // until it is there
        fresh.push_back(symbols[n]);
    }
    if (fresh.empty()) return;
    const int64_t wide = map_.inner(), rows = int64_t(fresh.size());
    const Room vectors(rows * wide);
    for (int64_t r = 0; r < rows; ++r)
        std::copy_n(embedding_.data + fresh[size_t(r)] * wide, wide, vectors + r * wide);
    const Room& found = found_.emplace_back(rows * map_.outer());
    map_(vectors, rows, found, threads);
    for (int64_t r = 0; r < rows; ++r) known_[size_t(fresh[size_t(r)])] = found + r * map_.outer();
}

Stack::Stack(CellKind kind, const std::vector<Cell>& cells, const Kept<2>& embedding, int64_t rows, int threads)
    : kind_(kind), cells_(cells), rows_(rows), H_(cells[0].past.inner()), G_(cells[0].input.outer()), threads_(threads),
      table_(cells[0].input, embedding), past_(rows * G_), fed_(rows * G_), weighed_(rows * H_) {
    const int64_t all = int64_t(cells.size()) * rows * H_;
    for (int k = 0; k < (kind == CellKind::lstm ? 2 : 1); ++k) {
        const auto& [now, before] = states_.emplace_back(Room(all), Room(all));
        std::fill_n(static_cast<float*>(now), all, 0.0f);
    }
}

const float* Stack::step(const Rows& rows) {
    const int64_t R = rows.count, layers = int64_t(cells_.size());
    table_.need(rows.tokens, R, threads_);
    for (auto& [now, before] : states_) {
        std::swap(now, before);
        for (int64_t r = 0; r < R; ++r)
            for (int64_t n = 0; n < layers; ++n)
                std::copy_n(before + (n * rows_ + rows.parents[r]) * H_, H_, now + (n * rows_ + r) * H_);
    }
    float* h = nullptr;
    for (int64_t n = 0; n < layers; ++n) {
        if (n) cells_[size_t(n)].input(h, R, fed_, threads_);
        h = state(0, n);
        float* c = states_.size() > 1 ? state(1, n) : nullptr;
        auto x = [&](int64_t r) { return n ? fed_ + r * G_ : table_(rows.tokens[r]); };
        advance(kind_, cells_[size_t(n)], R, x, h, c, past_, weighed_, threads_);
    }
    return h;
}

}  // namespace thalweg
