// exp, log and softmax as functions of arrays, for those who compare them with wider numbers.
#pragma once

#include <cstdint>

#include "levels.h"

namespace thalweg {

template <class T>
struct ElementaryOf {
    void (*exp)(const T* x, int64_t count, T* out);
    void (*log)(const T* x, int64_t count, T* out);
    T (*softmax)(const T* x, int64_t count, T* out);  // gives log sum exp x
};
struct Elementary : ElementaryOf<float>, ElementaryOf<double> {};
THALWEG_KERNELS(Elementary, elementary)

}  // namespace thalweg
