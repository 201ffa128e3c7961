// Linear chains: what their kernels take and give. Indices were checked by who fills these in (chain.cpp).
#pragma once

#include <cstdint>

#include "levels.h"

namespace thalweg {

constexpr int64_t GROUP = 4;   // items that go side by side, or rows of them
constexpr int64_t CHUNK = 32;  // rows whose moves are added up in one go

// Labels in whole vectors of any level.
template <class T>
constexpr int64_t padded(int64_t size) {
    constexpr int64_t lanes = 64 / sizeof(T);
    return (size + lanes - 1) / lanes * lanes;
}

// Permitted moves, sorted by target, then source: `into[j]` .. `into[j + 1]` lead to j.
struct Edges {
    const int64_t *sources, *targets;  // (E,)
    const int64_t* into;               // (C + 1,)
};

// score(y) = start[y_1] + sum_t emissions[t, y_t] + sum_t transitions[y_t, y_t+1] + end[y_L], for each of B items.
template <class T>
struct Chains {
    const T* emissions;    // (B, T, C)
    const T* transitions;  // (1 or B, 1 or T - 1, C, C); (E,) for edges
    const T *start, *end;  // (C,)
    const int64_t* lengths;
    int64_t batch, steps, size;
    int64_t moves;             // C^2 or E: the numbers of one matrix
    int64_t by_item, by_step;  // how far apart those of two items, of two steps are; 0 where they share them
    Edges edges;               // nulls where every move has a score
};

enum class MovesOf { all, item, step };  // whose moves a gradient adds up

template <class T>
struct Likelihood {
    const int64_t* gold;  // (B, T), or null
    const T* weight;      // (B,) of each item in the gradient; null for 1
    T* values;            // (B,): log Z, or score(gold) - log Z
    T* d_emissions;       // (B, T, C): the gradient of log Z - score(gold); null where none is asked for
    T* d_moves;           // by item (B, moves), by step (B, T - 1, moves); null where all are added up
    MovesOf added;
};

// What a part adds up over its items.
struct Sums {
    double *moves, *start, *end;
    double value;
};

// Memory for the work on one part.
template <class T>
struct Room {
    T* numbers;
    double* wide;
    int64_t* back;  // of the k best alone
};
constexpr int64_t PIECE = 1 << 20;  // numbers: a chain is cut into pieces whose weights take no more
template <class T>
constexpr int64_t span_of(const Chains<T>& chains) {  // positions of a piece
    const int64_t most = PIECE / (2 * GROUP * padded<T>(chains.size)), span = most < 16 ? 16 : most;
    return span < chains.steps ? span : chains.steps;
}
template <class T>
constexpr int64_t pieces_of(const Chains<T>& chains) {
    return (chains.steps + span_of(chains) - 1) / span_of(chains);
}
template <class T>
constexpr int64_t numbers_of(const Chains<T>& chains) {
    const int64_t width = padded<T>(chains.size), span = span_of(chains);
    const int64_t moves = 3 * (chains.edges.into ? padded<T>(chains.moves) : chains.size * width);
    const int64_t trail = width * GROUP * (span + 1), whole = width * (chains.steps + 1);  // one item of Viterbi
    return moves + width * (3 * GROUP + CHUNK + 2) + pieces_of(chains) * GROUP * (width + 1) + GROUP * span * width +
           GROUP * (span + 1) + (trail > whole ? trail : whole);
}
template <class T>
constexpr int64_t wide_of(const Chains<T>& chains) {
    return chains.moves + chains.size * (chains.steps + 3);
}

template <class T>
struct ChainKernelsOf {
    // Of the items listed, which are in the order of falling length where they share their transitions.
    void (*likelihood)(const Chains<T>&, const Likelihood<T>&, const int64_t* items, int64_t count, Sums&, Room<T>);
    // Highest scores (B,) and their labellings (B, T), -1 past the length; the lowest label wins a tie.
    void (*viterbi)(const Chains<T>&, const int64_t* items, int64_t count, T* scores, int64_t* labels, Room<T>);
    // The k highest scores (B, k), falling, and their labellings (B, k, T); missing ones -inf and -1.
    void (*top_k)(const Chains<T>&, int64_t item, int64_t k, T* scores, int64_t* labels, Room<T>);
    // Samples (S, B, T) by uniform numbers of that shape; -1 past the length and where nothing is feasible.
    void (*sample)(const Chains<T>&, int64_t item, int64_t count, const T* uniforms, int64_t* labels, Room<T>);
};
struct ChainKernels : ChainKernelsOf<float>, ChainKernelsOf<double> {};
THALWEG_KERNELS(ChainKernels, chain_kernels)

}  // namespace thalweg
