// Associative memories in float32: queries side by side in the lanes of vectors, weights never held.
//
// A panel of queries is a matrix (features, PANEL). Scores of patterns and mixtures of values are then products of
// patterns as they lie in memory with a panel: nothing is packed, nothing is added up across a vector, and what one
// step gives is what the next one takes.
#pragma once

#include <cstdint>

#include "levels.h"

namespace thalweg {

constexpr int64_t PANEL = 32;  // queries of a panel
constexpr int64_t BLOCK = 32;  // patterns between two looks at the highest score

struct Patterns {
    const float *keys, *values;  // (count, inner), (count, outer)
    int64_t count, inner, outer;
    float beta;
    float gap;  // beta times how far below the highest score a pattern counts for nothing
};

// Queries (inner, PANEL), in the lanes 0..busy - 1; the rest of their last vector is 0.
struct Panel {
    float* state;
    int64_t busy;
    bool mixing;  // whether any of them asks for more than its log-sum-exp
};

// What a panel has found in some of the patterns, lane by lane.
struct Pass {
    float top[PANEL], total[PANEL];  // the highest score, and the sum of weights relative to it
    int64_t width;                   // lanes that were looked at, of PANEL
    float* mixed;                    // (outer, width): the sum of values times these weights
    float* fresh;                    // (outer, width): that of one block
    float* scores;                   // (BLOCK, width)
};

// How a step to the mixture was: |new - old|^2, new . (new - old), |old|^2, |new|^2.
struct Moved {
    float way[PANEL], along[PANEL], before[PANEL], after[PANEL];
};

struct Memories {
    void (*sweep)(const Patterns& patterns, const Panel& panel, int64_t low, int64_t high, Pass& pass);
    void (*join)(const Patterns& patterns, const Pass& other, Pass& pass);
    void (*move)(const Patterns& patterns, const Pass& pass, Panel& panel, Moved& moved);
    float (*largest_square)(const float* rows, int64_t count, int64_t inner);  // of the norms; NaN if one is
};
THALWEG_KERNELS(Memories, memories)

}  // namespace thalweg
