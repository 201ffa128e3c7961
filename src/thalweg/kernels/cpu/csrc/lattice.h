// Paths through grids: what their kernels take and give. Indices were checked by who fills these in (lattice.cpp).
#pragma once

#include <cstdint>

#include "levels.h"

namespace thalweg {

constexpr int64_t MOST_MOVES = 64;

// A move (a, b) leads from cell (i - a, j - b) to (i, j), at scores[i, j, m], or at what row i emits for the label of
// column j. Cells of a sweep do not depend on each other: row i + skew * j.
template <class T>
struct Lattices {
    const T* scores;                // (B, height, width, kinds); with labels (B, height - 1, size)
    const int64_t* moves;           // (kinds, 2)
    const int64_t *rows, *columns;  // (B,): the last cell of each item
    const int64_t* labels;          // (B, width), or null
    int64_t batch, height, width, kinds, size;
    int64_t ends;  // a path ends in the last row and one of so many last columns; 0: it begins and ends anywhere
    int64_t band;  // below 0 for none
    int64_t skew;
    int64_t sweeps, row;  // of the largest item; numbers of a sweep in memory
    int64_t margin;       // numbers before its first lane
};

// Memory for the work on one item.
template <class T>
struct LatticeRoom {
    T *sums, *shares;  // (sweeps, row) each
    T* emitted;        // (sweeps, row) where there are labels
    double* offsets;   // (sweeps,): what was taken off the sums of a sweep
};

struct PathLists {
    double *scores, *found;     // (height * width, k), falling, and (k,) of the answer
    int64_t *before, *origins;  // which list of the cells before each entry came from, times k, plus its rank there
};

template <class T>
struct LatticeKernelsOf {
    // log Z of an item, and the probability of its moves, shaped as its scores, where it is asked for; with labels that
    // of its cells, (height - 1, width).
    double (*value)(const Lattices<T>&, int64_t item, const LatticeRoom<T>&, T* gradient);
    // `draws` paths (draws, B, steps) by uniforms (draws, B, steps + 2), of one item; returns log Z.
    double (*sample)(const Lattices<T>&, int64_t item, const LatticeRoom<T>&, const T* uniforms, int64_t* paths,
                     int64_t draws, int64_t steps);
    // The k best of an item: scores (k,) and paths (k, steps).
    void (*best)(const Lattices<T>&, int64_t item, const PathLists&, int64_t k, T* scores, int64_t* paths, int64_t steps);
};
struct LatticeKernels : LatticeKernelsOf<float>, LatticeKernelsOf<double> {};
THALWEG_KERNELS(LatticeKernels, lattice_kernels)

}  // namespace thalweg
