#include "decoding.h"
#include "simd.h"

namespace thalweg::THALWEG_LEVEL {
namespace {

constexpr int L = LANES<float>;
using V = Vector<float>;

// Numbers of weights, each kind as float32.
inline V widened(const float* from) { return load(from); }
inline V widened(const int8_t* from) {
    VectorN<int8_t, L> v;
    __builtin_memcpy(&v, from, sizeof v);
    return __builtin_convertvector(__builtin_convertvector(v, Vector<int32_t>), V);
}
inline V widened(const uint16_t* from) {  // bfloat16 is the upper half of a float32
    VectorN<uint16_t, L> v;
    __builtin_memcpy(&v, from, sizeof v);
    return bits<V>(__builtin_convertvector(v, Vector<uint32_t>) << 16);
}
template <class W>
inline V widened_some(const W* from, int64_t count) {
    W numbers[L] = {};
    for (int64_t i = 0; i < count; ++i) numbers[i] = from[i];
    return widened(numbers);
}

// Lanes of the last `count` of L.
inline Mask<float> last_lanes(int64_t count) {
    Mask<float> lanes;
    for (int i = 0; i < L; ++i) lanes[i] = i >= L - count ? -1 : 0;
    return lanes;
}

// The last inner % L numbers of a row, and 0 in lanes that were counted before.
template <class W>
inline V rest_of(const W* row, int64_t inner, Mask<float> lanes) {
    if (inner < L) return widened_some(row, inner);
    return select<float>(lanes, widened(row + inner - L), fill(0.0f));
}

// S lanes of a + b's halves in turn: after log2(L) rounds lane k is the sum over vector k.
template <int S, int... I>
inline V interleaved(V a, V b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I / S % 2 ? I - S + L : I)...) +
           __builtin_shufflevector(a, b, (I / S % 2 ? I + L : I + S)...);
}
template <int S>
inline void fold(V* v) {
#pragma GCC unroll 8
    for (int i = 0; i < S; ++i) v[i] = interleaved<S>(v[i], v[i + S], std::make_integer_sequence<int, L>{});
    if constexpr (S > 1) fold<S / 2>(v);
}

// What becomes of the sums of outputs n, n + 1 ... before they are written.
template <int C>
inline void finish(const Matrix& map, const float* sums, int64_t n, float* out) {
    typedef float Some __attribute__((vector_size(C * sizeof(float))));
    auto from = [](const float* at) {
        Some v;
        __builtin_memcpy(&v, at, sizeof v);
        return v;
    };
    Some y = from(sums);
    if (map.scale) y *= from(map.scale + n);
    if (map.bias) y += from(map.bias + n);
    __builtin_memcpy(out, &y, sizeof y);
}

// ROWS rows of x by C outputs, all sums in registers; `whole` says that rows are whole vectors.
template <int ROWS, int C, bool whole, class W>
inline void dots(const Matrix& map, const float* x, int64_t x_row, int64_t n, Mask<float> lanes, float* out,
                 int64_t out_row) {
    const W* weight = static_cast<const W*>(map.weight) + n * map.row;
    V sums[ROWS * C] = {};
    int64_t i = 0;
    for (; i + L <= map.inner; i += L) {
        V b[C];
        for (int k = 0; k < C; ++k) b[k] = widened(weight + k * map.row + i);
        for (int m = 0; m < ROWS; ++m) {
            const V a = load(x + m * x_row + i);
            for (int k = 0; k < C; ++k) sums[m * C + k] += a * b[k];
        }
    }
    if constexpr (!whole) {
        V b[C];
        for (int k = 0; k < C; ++k) b[k] = rest_of(weight + k * map.row, map.inner, lanes);
        for (int m = 0; m < ROWS; ++m) {
            const V a = rest_of(x + m * x_row, map.inner, lanes);
            for (int k = 0; k < C; ++k) sums[m * C + k] += a * b[k];
        }
    }
    float found[ROWS * C];
    if constexpr (ROWS * C % L == 0) {
        for (int g = 0; g < ROWS * C; g += L) {
            fold<L / 2>(sums + g);
            store(found + g, sums[g]);
        }
    } else {
        for (int k = 0; k < ROWS * C; ++k) found[k] = sum_lanes<float>(sums[k]);
    }
    for (int m = 0; m < ROWS; ++m) finish<C>(map, found + m * C, n, out + m * out_row);
}

constexpr int ROWS = REGISTERS == 32 ? 4 : 2;
constexpr int64_t BLOCK = 48;  // rows that the nearest caches hold while the weights go by

template <bool whole, class W>
void linear_of(const Matrix& map, const float* x, int64_t x_row, int64_t rows, int64_t low, int64_t high, float* out,
               int64_t out_row) {
    const Mask<float> lanes = last_lanes(map.inner % L);
    for (int64_t first = 0; first < rows; first += BLOCK) {
        const int64_t end = first + BLOCK < rows ? first + BLOCK : rows;
        int64_t n = low;
        for (; n + 4 <= high; n += 4) {
            int64_t m = first;
            for (; m + ROWS <= end; m += ROWS)
                dots<ROWS, 4, whole, W>(map, x + m * x_row, x_row, n, lanes, out + m * out_row + n, out_row);
            for (; m < end; ++m)
                dots<1, 4, whole, W>(map, x + m * x_row, x_row, n, lanes, out + m * out_row + n, out_row);
        }
        for (; n < high; ++n)
            for (int64_t m = first; m < end; ++m)
                dots<1, 1, whole, W>(map, x + m * x_row, x_row, n, lanes, out + m * out_row + n, out_row);
    }
}

void linear(const Matrix& map, const float* x, int64_t x_row, int64_t rows, int64_t low, int64_t high, float* out,
            int64_t out_row) {
    auto with = [&](auto example) {
        using W = decltype(example);
        (map.inner % L ? linear_of<false, W> : linear_of<true, W>)(map, x, x_row, rows, low, high, out, out_row);
    };
    switch (map.kind) {
        case Stored::single: return with(float());
        case Stored::half: return with(uint16_t());
        case Stored::byte: return with(int8_t());
    }
}

// f(place, count) for every vector of a row of `width` numbers.
template <class Function>
inline void along(int64_t width, Function f) {
    int64_t i = 0;
    for (; i + L <= width; i += L) f(i, L);
    if (i < width) f(i, width - i);
}
template <class Value>
inline float sum_along(int64_t width, Value value) {
    V sums = fill(0.0f);
    along(width, [&](int64_t i, int64_t count) { sums += value(i, count); });
    return sum_lanes<float>(sums);
}
inline float dot(const float* x, const float* y, int64_t width) {
    return sum_along(width, [&](int64_t i, int64_t n) { return load_some(x + i, n, 0.0f) * load_some(y + i, n, 0.0f); });
}

// out = sum_s weights[s] rows(s)
template <class Row>
inline void mix(const float* weights, Row rows, int64_t count, int64_t width, float* out) {
    int64_t i = 0;
    for (; i + 4 * L <= width; i += 4 * L) {  // four vectors at once: sums wait for one another
        V sums[4] = {};
        for (int64_t s = 0; s < count; ++s)
            for (int k = 0; k < 4; ++k) sums[k] += weights[s] * load(rows(s) + i + k * L);
        for (int k = 0; k < 4; ++k) store(out + i + k * L, sums[k]);
    }
    for (; i < width; i += L) {
        V sum = fill(0.0f);
        for (int64_t s = 0; s < count; ++s) sum += weights[s] * load_some(rows(s) + i, width - i, 0.0f);
        store_some(out + i, sum, width - i);
    }
}

// The weights of attention: where no score is finite there are none, and what has diverged must show.
inline void weigh(float* scores, int64_t count) {
    if (count && softmax(scores, count, scores) == -INFINITE<float>)
        for (int64_t s = 0; s < count; ++s) scores[s] = std::numeric_limits<float>::quiet_NaN();
}

void norm(const Normalisation& norm, const float* x, const float* residual, int64_t width, float* total, float* out) {
    const float sum = sum_along(width, [&](int64_t i, int64_t n) {
        V v = load_some(x + i, n, 0.0f);
        if (residual) v += load_some(residual + i, n, 0.0f);
        store_some(total + i, v, n);
        return v;
    });
    const float mean = norm.centred ? sum / float(width) : 0.0f;
    // A pass of its own, as the difference of two sums cancels where the mean is large.
    const float squares = sum_along(width, [&](int64_t i, int64_t n) {
        const V v = load_some(total + i, n, mean) - mean;
        return v * v;
    });
    const float variance = squares / float(width) + norm.eps;
    const float factor = 1.0f / std::sqrt(variance) + variance * 0.0f;  // where squares overflow NaN, not 0
    along(width, [&](int64_t i, int64_t n) {
        V v = (load_some(total + i, n, 0.0f) - mean) * factor * load_some(norm.weight + i, n, 0.0f);
        if (norm.bias) v += load_some(norm.bias + i, n, 0.0f);
        store_some(out + i, v, n);
    });
}

inline V magnitude(V x) { return x < 0.0f ? -x : x; }
inline V sigmoid(V x) { return 1.0f / (1.0f + exp<float>(-x)); }
inline V tanh(V x) { return 1.0f - 2.0f / (exp<float>(x + x) + 1.0f); }  // to 2e-7

inline V gelu(V x) {  // x Phi(x), with erf to 1.5e-7 (Abramowitz and Stegun, 7.1.26)
    const V z = magnitude(x * 0.70710678f), t = 1.0f / (1.0f + 0.3275911f * z);
    V p = fill(1.061405429f) * t - 1.453152027f;
    p = ((p * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f;
    const V tail = 0.5f * p * t * exp<float>(-z * z);
    return x * (x < 0.0f ? tail : 1.0f - tail);
}
inline V activated(Activation kind, V x) {
    switch (kind) {
        case Activation::relu: return x < 0.0f ? fill(0.0f) : x;
        case Activation::gelu: return gelu(x);
        case Activation::gelu_tanh: return x * sigmoid(1.5957691f * x * (1.0f + 0.044715f * x * x));
        default: return x * sigmoid(x);
    }
}

void activate(Activation kind, float* x, const float* gated, int64_t count) {
    along(count, [&](int64_t i, int64_t n) {
        V v = activated(kind, load_some(x + i, n, 0.0f));
        if (gated) v *= load_some(gated + i, n, 0.0f);
        store_some(x + i, v, n);
    });
}

void tanh_all(float* x, int64_t count) {
    along(count, [&](int64_t i, int64_t n) { store_some(x + i, tanh(load_some(x + i, n, 0.0f)), n); });
}

void rotate(float* x, int64_t heads, int64_t size, const float* cosines, const float* sines) {
    const int64_t half = size / 2;
    for (float* head = x; head < x + heads * size; head += size) {
        for (int64_t k = 0; k < half; ++k) {
            const float low = head[k], high = head[half + k];
            head[k] = low * cosines[k] - high * sines[k];
            head[half + k] = high * cosines[k] + low * sines[k];
        }
    }
}

void attend(const Attention& how, const float* query, const float* const* keys, int64_t count, int64_t values,
            float* scores, float* out) {
    for (int64_t s = 0; s < count; ++s)
        for (int64_t h = 0; h < how.heads; ++h) {
            const float score = how.scale * dot(query + h * how.size, keys[s] + h * how.size, how.size);
            scores[h * count + s] = how.distances ? score + how.distances[h * how.reach + count - 1 - s] : score;
        }
    for (int64_t h = 0; h < how.heads; ++h) {
        weigh(scores + h * count, count);
        const int64_t at = h * how.size;
        mix(scores + h * count, [&](int64_t s) { return keys[s] + values + at; }, count, how.size, out + at);
    }
}

void read(const Reading& how, const float* query, const float* keys, const float* values, int64_t count,
          const float* own, float* scores, float* out) {
    for (int64_t s = 0; s < count; ++s) {
        const float* key = keys + s * how.width;
        scores[s] = !how.weights ? dot(query, key, how.width) : sum_along(how.width, [&](int64_t i, int64_t n) {
            return load_some(how.weights + i, n, 0.0f) *
                   tanh(load_some(query + i, n, 0.0f) + load_some(key + i, n, 0.0f));
        });
    }
    weigh(scores, count);
    mix(scores, [&](int64_t s) { return values + s * how.out; }, count, how.out, out);
    along(how.out, [&](int64_t i, int64_t n) {
        store_some(out + i, tanh(load_some(out + i, n, 0.0f) + load_some(own + i, n, 0.0f)), n);
    });
}

void cell(CellKind kind, const float* x, const float* past, float* h, float* c, int64_t width) {
    along(width, [&](int64_t i, int64_t n) {
        auto from = [&](const float* row, int64_t gate) { return load_some(row + gate * width + i, n, 0.0f); };
        auto gate = [&](int64_t k) { return from(x, k) + from(past, k); };
        if (kind == CellKind::lstm) {
            const V carried = sigmoid(gate(1)) * from(c, 0) + sigmoid(gate(0)) * tanh(gate(2));
            store_some(c + i, carried, n);
            store_some(h + i, sigmoid(gate(3)) * tanh(carried), n);
        } else {
            const bool after = kind == CellKind::gru;  // otherwise past holds z, and n of what was reset before
            const V z = after ? sigmoid(gate(1)) : from(past, 1);
            const V fresh = tanh(after ? from(x, 2) + sigmoid(gate(0)) * from(past, 2) : gate(2));
            store_some(h + i, fresh + z * (from(h, 0) - fresh), n);
        }
    });
}

void reset(const float* x, float* past, const float* h, float* weighed, int64_t width) {
    along(width, [&](int64_t i, int64_t n) {
        auto gate = [&](int64_t k) {
            return sigmoid(load_some(x + k * width + i, n, 0.0f) + load_some(past + k * width + i, n, 0.0f));
        };
        store_some(weighed + i, gate(0) * load_some(h + i, n, 0.0f), n);
        store_some(past + width + i, gate(1), n);
    });
}

void log_softmax(float* row, const float* mask, int64_t count) {
    along(count, [&](int64_t i, int64_t n) {
        store_some(row + i, load_some(row + i, n, 0.0f) + load_some(mask + i, n, 0.0f), n);
    });
    const float top = max_row(row, count);
    double total = 0.0;
    for (int64_t first = 0; first < count; first += 32 * L) {
        const int64_t end = first + 32 * L < count ? 32 * L : count - first;
        total += sum_along(end, [&](int64_t i, int64_t n) {
            return exp<float>(load_some(row + first + i, n, -INFINITE<float>) - top);
        });
    }
    const float shift = float(double(top) + std::log(total));
    along(count, [&](int64_t i, int64_t n) { store_some(row + i, load_some(row + i, n, 0.0f) - shift, n); });
}

void mixture(const float* weights, const float* rows, int64_t count, int64_t width, float* out) {
    along(width, [&](int64_t i, int64_t n) {
        auto part = [&](int64_t s) { return load_some(rows + s * width + i, n, 0.0f) + weights[s]; };
        V top = part(0), total = fill(0.0f);
        for (int64_t s = 1; s < count; ++s) {
            const V x = part(s);
            top = x > top ? x : top;
        }
        top = top > -INFINITE<float> ? top : 0.0f;  // what is nowhere is -inf
        for (int64_t s = 0; s < count; ++s) total += exp<float>(part(s) - top);
        store_some(out + i, top + log<float>(total), n);
    });
}

}  // namespace

extern const Decoding decoding = {linear, norm,  activate, rotate,   attend,      read,
                                  cell,   reset, tanh_all, log_softmax, mixture};

}  // namespace thalweg::THALWEG_LEVEL
