// What the steps of decoders are made of: products with stored weights, norms, activations, attention, recurrent cells.
// Weights are read where they lie, in the layout that torch gives them.
#pragma once

#include <cstdint>

#include "levels.h"

namespace thalweg {

enum class Stored { single, half, byte };  // float32, bfloat16, int8

// A linear map: y[n] = scale[n] * sum_i weight[n, i] x[i] + bias[n]; no scale or bias at nullptr.
struct Matrix {
    const void* weight;
    Stored kind;
    int64_t outer, inner, row;  // `row`: numbers from one output's weights to the next one's
    const float *scale, *bias;
};

struct Normalisation {
    const float *weight, *bias;  // no bias: nullptr
    float eps;
    bool centred;  // LayerNorm; otherwise by the root mean square
};

enum class Activation { relu, gelu, gelu_tanh, silu };

// Attention of one row with `heads` heads of `size` numbers side by side.
struct Attention {
    int64_t heads, size;
    float scale;  // of the scores
    const float* distances;  // (heads, reach), added to the score of the key that far back; nullptr: nothing
    int64_t reach;
};

enum class CellKind { lstm, gru, gru_reset_before };

// The attention of recurrent decoders: dot products of query and key, or sum_j weights[j] tanh(query[j] + key[j]).
struct Reading {
    const float* weights;  // of the additive score; nullptr: dot products
    int64_t width, out;  // numbers of a key and of a value
};

struct Decoding {
    // Outputs low..high of the map for `rows` rows of x.
    void (*linear)(const Matrix& map, const float* x, int64_t x_row, int64_t rows, int64_t low, int64_t high,
                   float* out, int64_t out_row);
    // total = x + residual (or x, at nullptr), out = its norm; all may be the same memory.
    void (*norm)(const Normalisation& norm, const float* x, const float* residual, int64_t width, float* total,
                 float* out);
    // x = f(x), times `gated` unless that is nullptr.
    void (*activate)(Activation kind, float* x, const float* gated, int64_t count);
    // Rotary positions of `heads` heads of `size` numbers: cosines and sines are (size / 2).
    void (*rotate)(float* x, int64_t heads, int64_t size, const float* cosines, const float* sines);
    // out = sum_s p_s value_s, p = softmax of the scores of `count` keys; values lie `values` numbers after their keys.
    // `scores` is room for heads * count numbers.
    void (*attend)(const Attention& how, const float* query, const float* const* keys, int64_t count, int64_t values,
                   float* scores, float* out);
    // out = tanh(own + sum_s p_s value_s), p = softmax of the scores; `scores` is room for `count` numbers.
    void (*read)(const Reading& how, const float* query, const float* keys, const float* values, int64_t count,
                 const float* own, float* scores, float* out);
    // A step of a row: `x` and `past` are what input and last state give to the gates; h and c change in place.
    // LSTM: gates i, f, g, o. GRU: r, z, n, of which past's n waits for r.
    void (*cell)(CellKind kind, const float* x, const float* past, float* h, float* c, int64_t width);
    // The first half of a GRU that resets before its product: weighed = r h, and z in place of past's z.
    void (*reset)(const float* x, float* past, const float* h, float* weighed, int64_t width);
    void (*tanh)(float* x, int64_t count);
    // Log-probabilities in place of logits + mask; a row with NaN, or without a finite maximum, becomes NaN.
    void (*log_softmax)(float* row, const float* mask, int64_t count);
    // out[v] = log sum_s exp(weights[s] + rows[s][v]) of `count` rows of `width` numbers.
    void (*mixture)(const float* weights, const float* rows, int64_t count, int64_t width, float* out);
};
THALWEG_KERNELS(Decoding, decoding)

}  // namespace thalweg
