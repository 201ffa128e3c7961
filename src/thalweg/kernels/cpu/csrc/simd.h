// Vectors of whatever width the level of this compilation has, by the vector types of GCC and Clang.
//
// Only sources that are compiled once for each level (KERNELS in CMakeLists.txt) include this file. Such a source keeps
// to plain loops, its own templates and what is here: a function of the standard library that is not inlined would be
// shared between levels, and the linker might keep the copy that an older processor cannot run.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#ifndef THALWEG_LEVEL
#error "simd.h belongs to sources that are compiled once for each level: see KERNELS in CMakeLists.txt"
#endif

namespace thalweg::THALWEG_LEVEL {

#if defined(__AVX512F__)
constexpr int BYTES = 64, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int BYTES = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int BYTES = 16, REGISTERS = 32;  // NEON
#else
constexpr int BYTES = 16, REGISTERS = 16;  // SSE2
#endif

template <class T, int N>
struct VectorOf {
    typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <class T, int N>
using VectorN = typename VectorOf<T, N>::type;

template <class T>
constexpr int LANES = BYTES / int(sizeof(T));
template <class T>
using Vector = VectorN<T, LANES<T>>;

template <class T>
using Whole = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
template <class T>
using Mask = Vector<Whole<T>>;  // what comparisons give: -1 or 0 in each lane

template <class T>
constexpr T INFINITE = std::numeric_limits<T>::infinity();

template <class T>
inline Vector<T> load(const T* from) {
    Vector<T> v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}
template <class T>
inline void store(T* to, Vector<T> v) {
    __builtin_memcpy(to, &v, sizeof v);
}
template <class T>
inline Vector<T> fill(T x) {
    return x - Vector<T>{};  // nothing to compute, unlike 0 + x, which makes 0 of -0
}
template <class To, class From>
inline To bits(From v) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &v, sizeof to);
    return to;
}
template <class T>
inline Vector<T> select(Mask<T> where, Vector<T> yes, Vector<T> no) {
    return where ? yes : no;
}
template <class T>
inline Vector<T> larger(Vector<T> a, Vector<T> b) {  // b where either is NaN
    return a > b ? a : b;
}

#ifdef __AVX512F__
inline uint16_t first_lanes(int64_t count) { return count > 0 ? uint16_t((1u << count) - 1) : 0; }
#endif

// The first `count` numbers and `rest` in the lanes after; nothing past them is read.
template <class T>
inline Vector<T> load_some(const T* from, int64_t count, T rest) {
    if (count >= LANES<T>) return load(from);
#ifdef __AVX512F__
    if constexpr (sizeof(T) == 4) return _mm512_mask_loadu_ps(fill(rest), first_lanes(count), from);
    if constexpr (sizeof(T) == 8) return _mm512_mask_loadu_pd(fill(rest), first_lanes(count), from);
#endif
    Vector<T> v = fill(rest);
    for (int64_t i = 0; i < count; ++i) v[i] = from[i];
    return v;
}
template <class T>
inline void store_some(T* to, Vector<T> v, int64_t count) {
    if (count >= LANES<T>) return store(to, v);
#ifdef __AVX512F__
    if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_ps(to, first_lanes(count), v);
    if constexpr (sizeof(T) == 8) return _mm512_mask_storeu_pd(to, first_lanes(count), v);
#endif
    for (int64_t i = 0; i < count; ++i) to[i] = v[i];
}

template <class T, int N, int... I>
inline VectorN<T, N / 2> half_of(VectorN<T, N> v, std::integer_sequence<int, I...>, bool upper) {
    return upper ? __builtin_shufflevector(v, v, (I + N / 2)...) : __builtin_shufflevector(v, v, I...);
}
// All lanes folded into one, halves first.
template <class T, int N = LANES<T>, class Fold>
inline T across(VectorN<T, N> v, Fold fold) {
    if constexpr (N == 2) {
        return fold(v[0], v[1]);
    } else {
        constexpr auto half = std::make_integer_sequence<int, N / 2>{};
        return across<T, N / 2>(fold(half_of<T, N>(v, half, false), half_of<T, N>(v, half, true)), fold);
    }
}
template <class T>
inline T sum_lanes(Vector<T> v) {
    return across<T>(v, [](auto a, auto b) { return a + b; });
}
template <class T>
inline T max_lanes(Vector<T> v) {
    return across<T>(v, [](auto a, auto b) { return a > b ? a : b; });
}

// Numbers of each floating type that `exp` and `log` need.
template <class T>
struct Float;
template <>
struct Float<float> {
    static constexpr int mantissa = 23, bias = 127, small = 25;
    static constexpr float magic = 12582912.0f;  // 1.5 * 2^23: what is added to it becomes a whole number in its last bits
    static constexpr float lowest = -103.98f, highest = 90.0f;  // of exponents: beyond is 0 or infinite
    static constexpr float ln2_high = 0.693145751953125f, ln2_low = 1.42860682030941723212e-6f;
    static constexpr int terms = 7, log_terms = 5;
};
template <>
struct Float<double> {
    static constexpr int mantissa = 52, bias = 1023, small = 54;
    static constexpr double magic = 6755399441055744.0;  // 1.5 * 2^52
    static constexpr double lowest = -745.14, highest = 715.0;
    static constexpr double ln2_high = 6.93147180369123816490e-01, ln2_low = 1.90821492927058770002e-10;
    static constexpr int terms = 13, log_terms = 10;
};

template <class T>
constexpr T inverse_factorial(int n) {
    double product = 1.0;
    for (int k = 2; k <= n; ++k) product *= k;
    return T(1.0 / product);
}

// e^x to about an ulp, subnormal results too; 0 for -inf, NaN for NaN.
template <class T>
inline Vector<T> exp(Vector<T> x) {
    using F = Float<T>;
    using U = std::make_unsigned_t<Whole<T>>;
    using Words = Vector<U>;
    const Mask<T> gone = x < F::lowest;  // taken out, for a product that underflows costs more than all the rest
    x = gone ? fill(T(0)) : x;
    x = x > F::highest ? fill(F::highest) : x;
    Vector<T> shifted = x * T(1.4426950408889634074) + F::magic;
    Vector<T> n = shifted - F::magic;
    Vector<T> r = (x - n * F::ln2_high) - n * F::ln2_low;
    Vector<T> p = fill(inverse_factorial<T>(F::terms));
#pragma GCC unroll 16
    for (int k = F::terms - 1; k >= 0; --k) p = p * r + inverse_factorial<T>(k);
    // 2^n as two factors, each of which is a normal number.
    Words power = bits<Words>(shifted) - bits<Words>(fill(F::magic)) + U(4 * F::bias);
    Words first = power >> 1, second = power - first;
    Vector<T> a = bits<Vector<T>>((first - U(F::bias)) << F::mantissa);
    Vector<T> b = bits<Vector<T>>((second - U(F::bias)) << F::mantissa);
    return gone ? fill(T(0)) : p * a * b;
}

// ln x to about an ulp, of subnormal numbers too; -inf for 0, NaN below.
template <class T>
inline Vector<T> log(Vector<T> x) {
    using F = Float<T>;
    using U = std::make_unsigned_t<Whole<T>>;
    using Words = Vector<U>;
    Mask<T> tiny = x < std::numeric_limits<T>::min();
    Vector<T> normal = tiny ? x * T(U(1) << F::small) : x;
    // Split so that the mantissa lies between sqrt(1/2) and sqrt(2): the bits of sqrt(1/2) are taken off and put back.
    const U root = bits<U>(T(0.70710678118654752440));
    Words word = bits<Words>(normal) - root + (U(F::bias) << F::mantissa);
    Vector<T> m = bits<Vector<T>>((word & U((U(1) << F::mantissa) - 1)) + root);
    Vector<T> k = bits<Vector<T>>((word >> F::mantissa) - U(F::bias) + bits<U>(F::magic)) - F::magic;
    k = tiny ? k - T(F::small) : k;
    Vector<T> f = m - T(1), s = f / (f + T(2)), z = s * s, square = T(0.5) * f * f;
    Vector<T> p = fill(T(2.0 / (2 * F::log_terms + 1)));
#pragma GCC unroll 16
    for (int n = F::log_terms - 1; n >= 1; --n) p = p * z + T(2.0 / (2 * n + 1));
    Vector<T> found = k * F::ln2_high - ((square - (s * (square + z * p) + k * F::ln2_low)) - f);
    found = x < INFINITE<T> ? found : x;  // infinity and NaN are what they are
    found = x == T(0) ? fill(-INFINITE<T>) : found;
    return x < T(0) ? fill(std::numeric_limits<T>::quiet_NaN()) : found;
}

template <class T>
inline T exp_of(T x) {
    return exp<T>(fill(x))[0];
}
template <class T>
inline T log_of(T x) {
    return log<T>(fill(x))[0];
}

// The largest of `count` numbers, -inf of none.
template <class T>
inline T max_row(const T* x, int64_t count) {
    Vector<T> top = fill(-INFINITE<T>);
    for (int64_t i = 0; i < count; i += LANES<T>) top = larger<T>(load_some(x + i, count - i, -INFINITE<T>), top);
    return max_lanes<T>(top);
}

// x, or 0 where it is -inf: a maximum that may be subtracted.
template <class T>
inline T finite_or_zero(T x) {
    return x > -INFINITE<T> ? x : T(0);
}
template <class T>
inline void fill_row(T* out, int64_t count, T x) {
    for (int64_t i = 0; i < count; ++i) out[i] = x;
}
// exp(x - shift) with zeros up to `width`.
template <class T>
inline void exp_row(const T* x, int64_t size, T shift, int64_t width, T* out) {
    for (int64_t i = 0; i < width; i += LANES<T>) store(out + i, exp<T>(load_some(x + i, size - i, -INFINITE<T>) - shift));
}
// exp(x - shift) in place; the sum of it.
template <class T>
inline T exp_in_place(T* x, int64_t count, T shift) {
    Vector<T> total = fill(T(0));
    for (int64_t i = 0; i < count; i += LANES<T>) {
        const Vector<T> found = exp<T>(load_some(x + i, count - i, -INFINITE<T>) - shift);
        store_some(x + i, found, count - i);
        total += found;
    }
    return sum_lanes<T>(total);
}
// The first place of the largest number.
template <class T>
inline int64_t first_of(const T* x, int64_t count) {
    const T most = max_row(x, count);
    for (int64_t i = 0; i < count; ++i)
        if (x[i] == most) return i;
    return 0;
}
// The place at which the running sum of weights passes u times their sum; never one of weight 0.
inline int64_t drawn(const double* weights, int64_t count, double u) {
    double total = 0, running = 0;
    int64_t last = 0;
    for (int64_t k = 0; k < count; ++k) {
        total += weights[k];
        if (weights[k] > 0) last = k;
    }
    for (int64_t k = 0; k < count; ++k) {
        running += weights[k];
        if (running > u * total) return k;
    }
    return last;
}

// A falling list of at most k scores, each with where it came from.
struct Best {
    double* scores;
    int64_t *origins, k, filled = 0;

    bool put(double score, int64_t origin) {  // behind those that are as good; false where it does not belong there
        if (!(score > -INFINITE<double>) || (filled == k && !(score > scores[k - 1]))) return false;
        int64_t at = filled < k ? filled++ : k - 1;
        for (; at > 0 && score > scores[at - 1]; --at) scores[at] = scores[at - 1], origins[at] = origins[at - 1];
        scores[at] = score, origins[at] = origin;
        return true;
    }
};

// softmax(x) into `out`, which may be `x`; returns log sum exp x, -inf (and zeros) where every number is.
template <class T>
inline T softmax(const T* x, int64_t count, T* out) {
    const T top = max_row(x, count);
    const T shift = top > -INFINITE<T> ? top : T(0);
    Vector<T> sums = fill(T(0));
    for (int64_t i = 0; i < count; i += LANES<T>) {
        Vector<T> e = exp<T>(load_some(x + i, count - i, -INFINITE<T>) - shift);
        sums += e;
        store_some(out + i, e, count - i);
    }
    const T total = sum_lanes<T>(sums);
    const T factor = total > T(0) ? T(1) / total : T(0);
    for (int64_t i = 0; i < count; i += LANES<T>) {
        store_some(out + i, load_some(out + i, count - i, T(0)) * factor, count - i);
    }
    return total > T(0) ? shift + log_of(total) : (total == T(0) ? -INFINITE<T> : total);
}

// What a product adds up: ordinary sums of products, or the highest of sums.
struct SumProduct {
    template <class T>
    static constexpr T nothing = T(0);
    template <class V>
    static V add(V sum, V a, V b) {
        return sum + a * b;
    }
};
struct MaxPlus {
    template <class T>
    static constexpr T nothing = -INFINITE<T>;
    template <class V>
    static V add(V most, V a, V b) {
        V sum = a + b;
        return sum > most ? sum : most;
    }
};

// Rows of a matrix: entry (m, k) is at data[m * row + k * column].
template <class T>
struct Rows {
    const T* data;
    int64_t row, column = 1;
};

// The product tile: ROWS x (COLUMNS vectors) of a b over `inner`, all sums in registers; added to what `out` holds where
// `onto` says so. `b` is (inner, COLUMNS * LANES), `out` (ROWS, COLUMNS * LANES), each with the stride of its rows.
template <class Algebra, bool onto, int ROWS, int COLUMNS, class T>
inline void tile(Rows<T> a, const T* b, int64_t b_row, int64_t inner, T* out, int64_t out_row) {
    Vector<T> sums[ROWS][COLUMNS];
    for (int m = 0; m < ROWS; ++m)
        for (int n = 0; n < COLUMNS; ++n)
            sums[m][n] = onto ? load(out + m * out_row + n * LANES<T>) : fill(Algebra::template nothing<T>);
    for (int64_t k = 0; k < inner; ++k) {
        Vector<T> right[COLUMNS];
        for (int n = 0; n < COLUMNS; ++n) right[n] = load(b + k * b_row + n * LANES<T>);
        for (int m = 0; m < ROWS; ++m) {
            const Vector<T> left = fill(a.data[m * a.row + k * a.column]);
            for (int n = 0; n < COLUMNS; ++n) sums[m][n] = Algebra::add(sums[m][n], left, right[n]);
        }
    }
    for (int m = 0; m < ROWS; ++m)
        for (int n = 0; n < COLUMNS; ++n) store(out + m * out_row + n * LANES<T>, sums[m][n]);
}

template <class Algebra, bool onto, int COLUMNS, class T>
inline void columns(Rows<T> a, const T* b, int64_t b_row, int64_t rows, int64_t inner, T* out, int64_t out_row) {
    if constexpr (8 * COLUMNS <= REGISTERS / 2)  // enough sums at once that none waits for the one before
        for (; rows >= 8; rows -= 8, a.data += 8 * a.row, out += 8 * out_row)
            tile<Algebra, onto, 8, COLUMNS>(a, b, b_row, inner, out, out_row);
    for (; rows >= 4; rows -= 4, a.data += 4 * a.row, out += 4 * out_row)
        tile<Algebra, onto, 4, COLUMNS>(a, b, b_row, inner, out, out_row);
    if (rows >= 2) {
        tile<Algebra, onto, 2, COLUMNS>(a, b, b_row, inner, out, out_row);
        rows -= 2, a.data += 2 * a.row, out += 2 * out_row;
    }
    if (rows) tile<Algebra, onto, 1, COLUMNS>(a, b, b_row, inner, out, out_row);
}

// out = a b, or out += a b, by tiles: `a` is (rows, inner), `b` (inner, width), `out` (rows, width), with `width` a
// whole number of vectors.
template <class Algebra = SumProduct, bool onto = false, class T>
inline void product(Rows<T> a, const T* b, int64_t b_row, int64_t rows, int64_t inner, int64_t width, T* out,
                    int64_t out_row) {
    constexpr int L = LANES<T>;
    int64_t n = 0;
    if constexpr (REGISTERS == 32)
        for (; n + 4 * L <= width; n += 4 * L) columns<Algebra, onto, 4>(a, b + n, b_row, rows, inner, out + n, out_row);
    for (; n + 2 * L <= width; n += 2 * L) columns<Algebra, onto, 2>(a, b + n, b_row, rows, inner, out + n, out_row);
    if (n < width) columns<Algebra, onto, 1>(a, b + n, b_row, rows, inner, out + n, out_row);
}

}  // namespace thalweg::THALWEG_LEVEL
