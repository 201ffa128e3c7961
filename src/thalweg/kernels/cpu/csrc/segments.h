// Segmentations: what their kernels take and give, all in float64. Indices were checked by who fills these in
// (segments.cpp).
#pragma once

#include <cstdint>

#include "levels.h"

namespace thalweg {

// A segment of label c over positions f .. p - 1 scores parts[f, 1, c] + sum_t parts[t, 0, c] + durations[p - f - 1, c],
// and moves[i, c] after one of label i.
struct Segments {
    const double* parts;      // (B, T, 2, C)
    const double* durations;  // (1 or B, K, C)
    const double* moves;      // (1 or B, C, C)
    const int64_t* lengths;
    int64_t batch, steps, most, size;  // B, T, K, C
    int64_t by_item, moves_by_item;    // how far apart durations, moves of two items are; 0 where they share them

    int64_t width() const { return (size + 7) / 8 * 8; }  // labels in whole vectors of any level
    int64_t room() const {                                // numbers of memory for the work on one item
        const int64_t longest = most > size ? most : size;
        return width() * (6 * (steps + 1) + 3 * most + 4 * size + 7) + (longest + 7) / 8 * 8;
    }
};

// The gradient of an item's log Z; null where none is asked for.
struct SegmentGradient {
    double* parts;      // (T, 2, C)
    double* durations;  // (K, C)
    double* moves;      // (C, C)
};

struct SegmentKernels {
    // log Z of an item, -inf where nothing is feasible.
    double (*likelihood)(const Segments&, int64_t item, const SegmentGradient&, double* room);
    // The best segmentation (T,): c where a segment begins, C + c where it goes on, -1 past the length or without any;
    // the shorter last segment and the lower label win a tie.
    void (*viterbi)(const Segments&, int64_t item, int64_t* labels, double* room);
    // Samples by uniform numbers: those of sample s are (T, 2) from uniforms + s * apart * 2, its labels (T,) from
    // labels + s * apart.
    void (*sample)(const Segments&, int64_t item, int64_t count, int64_t apart, const double* uniforms, int64_t* labels,
                   double* room);
};
THALWEG_KERNELS(SegmentKernels, segment_kernels)

}  // namespace thalweg
