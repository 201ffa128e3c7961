// Entmax of rows: thresholds by Newton's iteration on shrinking candidates, no sorting.
//
// With d = alpha - 1, z_i = d (s_i - max s) and u the largest weight to the power d, the weights are (z_i + u)_+^(1/d),
// and for d <= 1 the norm ||(z + u)_+||_{1/d}, which must be 1, is convex and rises in u. Newton's iteration from above
// therefore falls towards the answer, never past it, and an entry that has lost its weight on the way never regains it.
// Solving for some of the entries gives a u that is large enough for all: the largest of every 64 entries are solved
// first, so that few candidates are left of a long row. Every weight rises in u, hence the weights differ from the exact
// ones by |sum - 1| in all, which is what ends the iteration. For d > 1 it is held in a bracket that is halved where it
// would not shrink by itself. Sums are kept in float64.
#pragma once

#include <cstdint>

#include "levels.h"

namespace thalweg {

constexpr int64_t SURVEYED = 64;  // entries of a row of which the largest is kept
constexpr int64_t SPARE = 8;      // places after the candidates that fill their last vector

template <class T>
struct MapRows {
    const T* scores;  // (rows, size)
    int64_t size;
    const double* alphas;  // (rows,)
    const int64_t* gold;  // (rows,) or nothing
    T* weights;           // (rows, size); with gold the gradient of the losses: less by 1 at the gold entry
    T* values;            // (rows,) or nothing: conjugates, or losses where there is gold
};

template <class T>
struct MapGradients {
    const T *weights, *grad;  // (rows, size)
    int64_t size;
    const double* alphas;
    T* out;  // (rows, size): the gradient in the scores
};

// Memory of one thread for rows of a size.
template <class T>
struct MapRoom {
    T* tops;          // (ceil(size / SURVEYED),)
    double *z, *p;    // (size + SPARE,) each
    int32_t* places;  // (size,)
};

template <class T>
struct SparseMapsOf {
    void (*forward)(const MapRows<T>& rows, int64_t low, int64_t high, const MapRoom<T>& room);
    void (*backward)(const MapGradients<T>& rows, int64_t low, int64_t high, const MapRoom<T>& room);
};
struct SparseMaps : SparseMapsOf<float>, SparseMapsOf<double> {};
THALWEG_KERNELS(SparseMaps, sparse_maps)

}  // namespace thalweg
