#include "simd.h"
#include "sparse_maps.h"

namespace thalweg::THALWEG_LEVEL {
namespace {

using V = Vector<double>;
constexpr int64_t L = LANES<double>;
constexpr int STEPS = 100;
constexpr int64_t FEW = 8 * SURVEYED;  // entries of a row that is not worth two rounds
constexpr double NONE = -INFINITE<double>;
enum Kind { any, linear, square };  // 1 / d is anything, 1 or 2

Kind kind_of(double d) { return d == 1.0 ? linear : d == 0.5 ? square : any; }

// Candidates of a row: d (score - highest), where they stand, and their weights; the last vector is filled up.
struct Candidates {
    double *z, *p;
    int32_t* places;
    int64_t count;

    void fill_up() {
        for (int64_t i = count; i % L; ++i) z[i] = NONE;
    }
    template <class Keeps>
    void keep(Keeps keeps) {
        int64_t kept = 0;
        for (int64_t i = 0; i < count; ++i) {
            z[kept] = z[i], places[kept] = places[i];
            kept += keeps(z[kept]);
        }
        count = kept;
        fill_up();
    }
};

// The largest of every SURVEYED entries, +inf where one is NaN.
template <class T>
T survey(const T* row, int64_t size, T* tops) {
    T top = -INFINITE<T>;
    for (int64_t begin = 0; begin < size; begin += SURVEYED) {
        const int64_t end = size - begin < SURVEYED ? size : begin + SURVEYED;
        Vector<T> best = fill(-INFINITE<T>);
        for (int64_t i = begin; i < end; i += LANES<T>) {
            const Vector<T> x = load_some(row + i, end - i, -INFINITE<T>);
            best = larger<T>(select<T>(x == x, x, fill(INFINITE<T>)), best);
        }
        const T most = max_lanes<T>(best);
        tops[begin / SURVEYED] = most;
        top = most > top ? most : top;
    }
    return top;
}

// u for 1 / d = 1 or 2, from one that is large enough.
double newton(Candidates& c, Kind kind, double u, double tolerance) {
    for (int step = 0; step < STEPS; ++step) {
        V sums = {}, squares = {}, kept = {};
        for (int64_t i = 0; i < c.count; i += L) {
            const V v = larger<double>(load(c.z + i) + u, V{});
            sums += v, squares += v * v;
            kept += select<double>(v > 0.0, fill(1.0), V{});
        }
        const double sum = sum_lanes<double>(sums), inside = sum_lanes<double>(kept);
        const double total = kind == linear ? sum : sum_lanes<double>(squares);
        const double moved = u - (kind == linear ? (total - 1.0) / inside : (total - std::sqrt(total)) / sum);
        if (std::abs(total - 1.0) <= tolerance || moved == u) break;
        if (2.0 * inside < double(c.count)) c.keep([u](double z) { return z + u > 0.0; });
        u = moved;
    }
    return u;
}

struct Sums {
    double p, slope, kept;
};

// Weights p = exp(log(1 + growth z) / d - c), 0 where there is no logarithm; sum p, sum p / (1 + growth z), how many.
Sums powers(Candidates& c, double growth, double inverse, double shift) {
    V total = {}, slope = {}, kept = {};
    for (int64_t i = 0; i < c.count; i += L) {
        V change = growth * load(c.z + i), inside = 1.0 + change;
        const Mask<double> on = inside > 0.0;
        change = select<double>(on, change, V{}), inside = select<double>(on, inside, fill(1.0));
        // What 1 + change rounds off is put back, as small changes need.
        const V left = inside - 1.0;
        const Mask<double> flat = left == 0.0;
        const V ratio = change / select<double>(flat, fill(1.0), left);
        const V log1p = select<double>(flat, change, log<double>(inside) * ratio);
        const V p = select<double>(on, exp<double>(log1p * inverse - shift), V{});
        store(c.p + i, p);
        total += p, slope += p / inside;
        kept += select<double>(on, fill(1.0), V{});
    }
    return {sum_lanes<double>(total), sum_lanes<double>(slope), sum_lanes<double>(kept)};
}

// c with u = e^(-dc), from one that is small enough, and the sum of weights that are left: in c the steps stay exact as
// d goes to 0. Up to d = 1 they are those of Newton's iteration on the norm and leave the bracket by rounding alone.
double bracketed(Candidates& c, double d, double low, double tolerance, double& total) {
    double at = low, high = __builtin_log(double(c.count)) + 1e-9, width = INFINITE<double>;
    bool done = false;
    for (int step = 0; step < STEPS; ++step) {
        const double growth = __builtin_exp(d * at < 690.0 ? d * at : 690.0);  // infinity times the 0 of the top is NaN
        const Sums sums = powers(c, growth, 1.0 / d, at);
        total = sums.p;
        if (done || std::abs(total - 1.0) <= tolerance) break;
        if (total < 1.0) {
            high = at;
        } else {
            low = at;
            if (sums.kept < double(c.count)) c.keep([growth](double z) { return growth * z > -1.0; });
        }
        const double change = total * __builtin_expm1(-d * __builtin_log(total)) / sums.slope;
        double moved = change > -1.0 ? at - __builtin_log1p(change) / d : INFINITE<double>;
        // What is left is rounding; the weights must be computed once more, as candidates may have moved.
        done = std::abs(moved - at) <= 1e-15 * at || high - low <= 1e-15 * high || step == STEPS - 2;
        if (!done && ((d > 1.0 && high - low > 0.5 * width) || !(low < moved && moved < high))) moved = 0.5 * (low + high);
        width = high - low;
        if (!done) at = moved;
    }
    return at;
}

// Entries above `least` become candidates; `tops` of the row, if given, say where there are none.
template <class T>
void gather(const T* row, int64_t size, const T* tops, double top, double d, double least, Candidates& c) {
    c.count = 0;
    for (int64_t begin = 0; begin < size; begin += SURVEYED) {
        if (tops && !(double(tops[begin / SURVEYED]) > least)) continue;
        const int64_t end = size - begin < SURVEYED ? size : begin + SURVEYED;
        for (int64_t i = begin; i < end; ++i) {
            const double s = row[i];
            c.z[c.count] = d * (s - top), c.places[c.count] = int32_t(i);
            c.count += s > least;
        }
    }
    c.fill_up();
}

// Candidates of a row with their weights, which sum to 1.
template <class T>
void solve(const T* row, int64_t size, const T* tops, double top, double d, Candidates& c) {
    const Kind kind = kind_of(d);
    double solved = kind == any ? 0.0 : 1.0, largest = 1.0, total = 0.0;
    for (int round = size > FEW ? 0 : 1; round < 2; ++round) {
        // A little lower, against rounding: a candidate too many does no harm.
        const double least = top - largest / d - 1e-14 * (std::abs(top) + 1.0 / d);
        const double tolerance = round == 0 ? 1e-3 : sizeof(T) == 4 ? 1e-9 : 1e-14;
        if (round == 0)
            gather(tops, (size + SURVEYED - 1) / SURVEYED, static_cast<const T*>(nullptr), top, d, least, c);
        else
            gather(row, size, tops, top, d, least, c);
        if (kind != any) {
            largest = solved = newton(c, kind, solved, tolerance);
            continue;
        }
        solved = bracketed(c, d, solved, tolerance, total);
        if (round == 0) {  // the sum may be below 1; its logarithm falls at least as fast as c rises
            solved += total < 1.0 ? __builtin_log(total) : 0.0;
            solved = solved > 0.0 ? solved : 0.0;
            largest = __builtin_exp(-d * solved);
        }
    }
    if (kind != any) {
        V sum = {};
        for (int64_t i = 0; i < c.count; i += L) {
            const V v = larger<double>(load(c.z + i) + solved, V{}), p = kind == linear ? v : v * v;
            store(c.p + i, p);
            sum += p;
        }
        total = sum_lanes<double>(sum);
    }
    for (int64_t i = 0; i < c.count; i += L) store(c.p + i, load(c.p + i) * (1.0 / total));
}

// <p, s> - Omega(p), less the score of gold where there is one.
template <class T>
double value_of(const T* row, const Candidates& c, double d, int64_t gold) {
    const double pivot = gold >= 0 ? double(row[gold]) : 0.0;
    if (pivot == NONE) return INFINITE<double>;
    const Kind kind = kind_of(d);
    double omega = 0.0, value = 0.0;
    for (int64_t i = 0; i < c.count; ++i) {
        const double p = c.p[i];
        if (!(p > 0.0)) continue;
        value += p * (double(row[c.places[i]]) - pivot);
        omega += p * (kind == linear ? p - 1.0 : kind == square ? std::sqrt(p) - 1.0 : __builtin_expm1(d * __builtin_log(p)));
    }
    return value - omega / (d * (1.0 + d));
}

template <class T>
void forward(const MapRows<T>& rows, int64_t low, int64_t high, const MapRoom<T>& room) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    for (int64_t r = low; r < high; ++r) {
        const T* row = rows.scores + r * rows.size;
        T* weights = rows.weights + r * rows.size;
        const int64_t gold = rows.gold ? rows.gold[r] : -1;
        const double alpha = rows.alphas[r], d = alpha - 1.0 < 1e-15 ? 1e-15 : alpha - 1.0;
        const double top = survey(row, rows.size, room.tops);
        if (!(top > NONE && top < INFINITE<double> && d < INFINITE<double>)) {
            fill_row(weights, rows.size, T(top > NONE ? nan : 0.0));
            if (rows.values) rows.values[r] = T(top > NONE ? nan : gold >= 0 ? INFINITE<double> : NONE);
            continue;
        }
        Candidates c{room.z, room.p, room.places, 0};
        solve(row, rows.size, room.tops, top, d, c);
        fill_row(weights, rows.size, T(0));
        for (int64_t i = 0; i < c.count; ++i) weights[c.places[i]] = T(c.p[i]);
        if (rows.values) rows.values[r] = T(value_of(row, c, d, gold));
        if (gold >= 0 && double(row[gold]) > NONE) weights[gold] -= T(1);
    }
}

// w (g - <w, g> / sum w) where w is p^(1 - d) on the support; what has no weight has no say, NaN included.
template <class T>
void backward(const MapGradients<T>& rows, int64_t low, int64_t high, const MapRoom<T>& room) {
    const double most = double(std::numeric_limits<T>::max()) / double(rows.size);
    for (int64_t r = low; r < high; ++r) {
        const T *weights = rows.weights + r * rows.size, *grad = rows.grad + r * rows.size;
        T* out = rows.out + r * rows.size;
        const double alpha = rows.alphas[r], d = alpha > 1.0 ? alpha - 1.0 : 0.0;
        const Kind kind = kind_of(d);
        double *w = room.p, *g = room.z, total = 0.0, mean = 0.0;
        int64_t count = 0;
        for (int64_t i = 0; i < rows.size; i += LANES<T>) {
            const int64_t end = rows.size - i < LANES<T> ? rows.size - i : LANES<T>;
            const Vector<T> p = load_some(weights + i, end, T(0));
            store_some(out + i, Vector<T>{}, end);
            if (!(max_lanes<T>(p) > T(0))) continue;
            for (int64_t k = i; k < i + end; ++k) {
                w[count] = weights[k], g[count] = grad[k], room.places[count] = int32_t(k);
                count += weights[k] > T(0);
            }
        }
        for (int64_t i = count; i % L; ++i) w[i] = 1.0;
        for (int64_t i = 0; i < count; i += L) {
            const V p = load(w + i);
            V power = fill(1.0);
            if (kind == square)
                for (int64_t k = 0; k < L; ++k) power[k] = std::sqrt(p[k]);
            if (kind == any) power = exp<double>((1.0 - d) * log<double>(p));
            store(w + i, select<double>(power < most, power, fill(most)));
        }
        for (int64_t i = 0; i < count; ++i) total += w[i];
        for (int64_t i = 0; i < count; ++i) mean += w[i] / total * g[i];
        for (int64_t i = 0; i < count; ++i) out[room.places[i]] = T(w[i] * (g[i] - mean));
    }
}

}  // namespace

extern const SparseMaps sparse_maps = {{forward<float>, backward<float>}, {forward<double>, backward<double>}};

}  // namespace thalweg::THALWEG_LEVEL
