#include "lattice.h"

#include "simd.h"

namespace thalweg::THALWEG_LEVEL {
namespace {

constexpr double NONE = -INFINITE<double>;

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t floored(int64_t a, int64_t b) { return a / b - (a % b < 0); }  // of b > 0

double log_add(double a, double b) {
    const double top = a > b ? a : b;
    return top > NONE ? top + log_of<double>(exp_of<double>(a - top) + exp_of<double>(b - top)) : NONE;
}

// `count` numbers that lie `step` apart, and `rest` in the lanes after.
template <class T>
inline Vector<T> gather(const T* from, int64_t step, int64_t count, T rest) {
#ifdef __AVX512F__
    if constexpr (sizeof(T) == 4) {
        const __m512i places = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                                  _mm512_set1_epi32(int32_t(step)));
        return _mm512_mask_i32gather_ps(fill(rest), first_lanes(count), places, from, 4);
    }
#endif
    Vector<T> v = fill(rest);
    for (int64_t k = 0; k < count; ++k) v[k] = from[k * step];
    return v;
}
template <class T>
inline void scatter(T* to, int64_t step, int64_t count, Vector<T> v) {
#ifdef __AVX512F__
    if constexpr (sizeof(T) == 4) {
        const __m512i places = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                                  _mm512_set1_epi32(int32_t(step)));
        return _mm512_mask_i32scatter_ps(to, first_lanes(count), places, v, 4);
    }
#endif
    for (int64_t k = 0; k < count; ++k) to[k * step] = v[k];
}

// One item: its cells by sweep and lane.
template <class T>
struct Grid {
    using V = Vector<T>;
    static constexpr int64_t L = LANES<T>;

    const Lattices<T>& all;
    const LatticeRoom<T>& room;
    const T* scores;
    const int64_t* labels;
    int64_t rows, columns, last;  // last sweep
    bool local;

    Grid(const Lattices<T>& all, int64_t item, const LatticeRoom<T>& room)
        : all(all), room(room),
          scores(all.scores + item * (all.labels ? (all.height - 1) * all.size : all.height * all.width * all.kinds)),
          labels(all.labels ? all.labels + item * all.width : nullptr), rows(all.rows[item]),
          columns(all.columns[item]), last(rows + all.skew * columns), local(all.ends == 0) {}

    T* lanes(T* of, int64_t sweep) const { return of + sweep * all.row + all.margin; }

    // Whether columns j - 2 and j may be neighbours on a path: where they emit different labels.
    bool unlike(int64_t j) const { return j >= 2 && labels[j] != labels[j - 2]; }

    // The lanes low..high of a sweep that lie in the grid and in the band.
    void range(int64_t d, int64_t& low, int64_t& high) const {
        low = all.skew ? most(0, d - rows) : 0, high = all.skew ? least(columns, d) : columns;
        const int64_t slope = rows + all.skew * columns;
        if (all.band < 0 || !slope) return;
        const int64_t reach = all.band * most(rows, columns);
        low = most(low, -floored(reach - d * columns, slope)), high = least(high, floored(d * columns + reach, slope));
    }
    bool holds(int64_t i, int64_t j) const {
        if (i < 0 || j < 0) return false;
        int64_t low, high;
        range(i + all.skew * j, low, high);
        return low <= j && j <= high;
    }
    T score(int64_t i, int64_t j, int64_t m) const {
        if (!labels) return scores[(i * all.width + j) * all.kinds + m];
        return all.moves[2 * m + 1] == 2 && !unlike(j) ? -INFINITE<T> : scores[(i - 1) * all.size + labels[j]];
    }
    // Scores of move m into `count` cells of a sweep from a lane on.
    V into(int64_t d, int64_t lane, int64_t count, int64_t m) const {
        if (labels) {
            const V emitted = load(lanes(room.emitted, d) + lane);
            return all.moves[2 * m + 1] == 2 ? emitted + load(lanes(room.emitted, 0) + lane) : emitted;
        }
        const T* from = scores + ((d - all.skew * lane) * all.width + lane) * all.kinds + m;
        return gather(from, all.kinds - all.skew * all.width * all.kinds, count, -INFINITE<T>);
    }
    // What comes by move m, less `base`; -inf where there is nothing to come from, whatever the score.
    V arriving(int64_t d, int64_t lane, int64_t count, int64_t m, double base) const {
        const int64_t a = all.moves[2 * m], b = all.moves[2 * m + 1], back = a + all.skew * b;
        if (back > d || b > all.margin) return fill(-INFINITE<T>);
        const V before = load(lanes(room.sums, d - back) + lane - b);
        const V sum = before + into(d, lane, count, m) + T(room.offsets[d - back] - base);
        return select<T>(before == -INFINITE<T>, before, sum);
    }

    // What every row emits for every lane; row 0, which emits nothing, bars moves of two columns between like labels.
    void emit() const {
        T* bars = lanes(room.emitted, 0);
        for (int64_t j = 0; j < columns + 1 + L; ++j) bars[j] = j <= columns && unlike(j) ? T(0) : -INFINITE<T>;
        for (int64_t i = 1; i <= rows; ++i) {
            T* row = lanes(room.emitted, i);
            const T* from = scores + (i - 1) * all.size;
            for (int64_t j = 0; j <= columns; ++j) row[j] = from[labels[j]];
            for (int64_t j = columns + 1; j < columns + 1 + L; ++j) row[j] = T(0);
        }
    }

    // log sum exp of all moves into cells of a sweep, less `base`.
    V moved(int64_t d, int64_t lane, int64_t count, double base) const {
        V terms[MOST_MOVES], top = fill(-INFINITE<T>), total = fill(T(0));
        for (int64_t m = 0; m < all.kinds; ++m) {
            terms[m] = arriving(d, lane, count, m, base);
            top = larger<T>(terms[m], top);
        }
        const V shift = select<T>(top == -INFINITE<T>, fill(T(0)), top);
        for (int64_t m = 0; m < all.kinds; ++m) total += exp<T>(terms[m] - shift);
        return log<T>(total) + shift;
    }

    // Sums over paths into every cell, those that begin in it too where they may; log Z. `apart` keeps, where paths
    // begin anywhere, the log-weight of those that end in a cell after a move.
    double forward(T* apart) const {
        if (labels) emit();
        double total = NONE;
        for (int64_t d = 0; d <= last; ++d) {
            T* here = lanes(room.sums, d);
            fill_row(here - all.margin, all.row, -INFINITE<T>);
            const double base = d ? room.offsets[d - 1] : 0.0;
            int64_t low, high;
            range(d, low, high);
            if (!d && !local) here[0] = T(0);
            for (int64_t j = low; j <= high && (d || local); j += L) {
                const int64_t count = least(L, high - j + 1);
                V found = d ? moved(d, j, count, base) : fill(-INFINITE<T>);
                if (local) {
                    for (int64_t k = 0; k < count; ++k) {
                        const double ended = double(found[k]) + base;
                        if (apart) lanes(apart, d)[j + k] = T(ended);
                        if (ended > NONE) total = log_add(total, ended);
                        found[k] = T(log_add(ended, 0.0) - base);
                    }
                }
                store_some(here + j, found, count);
            }
            const T highest = low <= high ? max_row(here + low, high - low + 1) : -INFINITE<T>;
            const T taken = finite_or_zero(highest);
            for (int64_t j = low; j <= high; ++j) here[j] -= taken;
            room.offsets[d] = base + double(taken);
        }
        for (int64_t e = 0; e < all.ends && e <= columns; ++e) total = log_add(total, ended(columns - e));
        return total;
    }
    double ended(int64_t column) const {  // log-weight of paths that end in this column
        const int64_t d = rows + all.skew * column;
        return double(lanes(room.sums, d)[column]) + room.offsets[d];
    }

    void backward(double total, T* gradient) const {
        const int64_t count = labels ? (all.height - 1) * all.width : all.height * all.width * all.kinds;
        fill_row(gradient, count, T(0));
        if (!(total > NONE)) return;
        fill_row(room.shares, (last + 1) * all.row, T(0));
        for (int64_t e = 0; e < all.ends && e <= columns; ++e)
            lanes(room.shares, rows + all.skew * (columns - e))[columns - e] = T(exp_of<double>(ended(columns - e) - total));
        for (int64_t d = last; d >= 1; --d) {
            int64_t low, high;
            range(d, low, high);
            for (int64_t j = low; j <= high; j += L) share(d, j, least(L, high - j + 1), total, gradient);
            if (!labels) continue;
            for (int64_t j = low; j <= high; ++j) gradient[(d - 1) * all.width + j] = lanes(room.shares, d)[j];
        }
    }
    // The probability of each move into cells of a sweep, given to the cells it comes from.
    void share(int64_t d, int64_t lane, int64_t count, double total, T* gradient) const {
        const V here = load_some(lanes(room.sums, d) + lane, count, -INFINITE<T>);
        const V own = load_some(lanes(room.shares, d) + lane, count, T(0));
        for (int64_t m = 0; m < all.kinds; ++m) {
            const int64_t a = all.moves[2 * m], b = all.moves[2 * m + 1], back = a + all.skew * b;
            if (back > d || b > all.margin) continue;
            const V sum = arriving(d, lane, count, m, room.offsets[d]);
            V share = select<T>(here == -INFINITE<T>, fill(T(0)), own * exp<T>(sum - here));
            if (local) share += exp<T>(sum + T(room.offsets[d] - total));
            T* before = lanes(room.shares, d - back) + lane - b;
            store(before, load(before) + share);
            if (labels) continue;
            T* to = gradient + ((d - all.skew * lane) * all.width + lane) * all.kinds + m;
            scatter(to, all.kinds - all.skew * all.width * all.kinds, count, share);
        }
    }

    // Where a path that is drawn ends: a lane of a sweep.
    void draw_end(double u, const T* apart, double total, int64_t& i, int64_t& j) const {
        double sum = 0.0;
        if (!local) {
            for (int64_t e = 0; e < all.ends && e <= columns; ++e) {
                const double share = exp_of<double>(ended(columns - e) - total);
                if (share > 0.0) j = columns - e;
                if ((sum += share) > u) break;
            }
            i = rows;
            return;
        }
        for (int64_t d = 1; d <= last; ++d) {
            int64_t low, high;
            range(d, low, high);
            for (int64_t lane = low; lane <= high; ++lane) {
                const double share = exp_of<double>(double(apart[d * all.row + all.margin + lane]) - total);
                if (!(share > 0.0)) continue;
                i = d - all.skew * lane, j = lane;
                if ((sum += share) > u) return;
            }
        }
    }
    // The move by which a path that is drawn came to a cell, of those with weight; `kinds` where it began there.
    int64_t draw_move(double u, int64_t i, int64_t j, bool begins) const {
        const int64_t d = i + all.skew * j;
        double weights[MOST_MOVES + 1], top = begins ? 0.0 : NONE, whole = 0.0, sum = 0.0;
        weights[all.kinds] = top;
        for (int64_t m = 0; m < all.kinds; ++m) {
            const int64_t a = all.moves[2 * m], b = all.moves[2 * m + 1], back = a + all.skew * b;
            weights[m] = NONE;
            if (!holds(i - a, j - b)) continue;
            const double before = double(lanes(room.sums, d - back)[j - b]) + room.offsets[d - back];
            if (before > NONE) weights[m] = before + double(score(i, j, m));
            top = weights[m] > top ? weights[m] : top;
        }
        for (int64_t m = 0; m <= all.kinds; ++m) whole += weights[m] = exp_of<double>(weights[m] - top);
        int64_t found = 0;
        for (int64_t m = 0; m <= all.kinds; ++m) {
            if (weights[m] > 0.0) found = m;
            if ((sum += weights[m]) > u * whole) break;
        }
        return found;
    }
};

void reversed(int64_t* path, int64_t count, int64_t steps) {
    for (int64_t k = 0; k < count / 2; ++k) {
        const int64_t kept = path[k];
        path[k] = path[count - 1 - k], path[count - 1 - k] = kept;
    }
    for (int64_t k = count; k < steps; ++k) path[k] = -1;
}

template <class T>
double value(const Lattices<T>& all, int64_t item, const LatticeRoom<T>& room, T* gradient) {
    const Grid<T> grid(all, item, room);
    const double total = grid.forward(nullptr);
    if (gradient) grid.backward(total, gradient);
    return total;
}

template <class T>
double sample(const Lattices<T>& all, int64_t item, const LatticeRoom<T>& room, const T* uniforms, int64_t* paths,
              int64_t draws, int64_t steps) {
    const Grid<T> grid(all, item, room);
    const double total = grid.forward(room.shares);
    for (int64_t n = 0; n < draws; ++n) {
        const T* u = uniforms + (n * all.batch + item) * (steps + 2);
        int64_t* path = paths + (n * all.batch + item) * steps;
        int64_t i = 0, j = 0, count = 0;
        if (total > NONE) grid.draw_end(*u++, room.shares, total, i, j);
        while (total > NONE && count < steps && (grid.local || i || j)) {
            const int64_t m = grid.draw_move(*u++, i, j, grid.local && count);
            if (m == all.kinds) break;
            path[count++] = (i * all.width + j) * all.kinds + m;
            i -= all.moves[2 * m], j -= all.moves[2 * m + 1];
        }
        reversed(path, count, steps);
    }
    return total;
}

template <class T>
void best(const Lattices<T>& all, int64_t item, const PathLists& lists, int64_t k, T* scores, int64_t* paths, int64_t steps) {
    const LatticeRoom<T> none{};
    const Grid<T> grid(all, item, none);
    const int64_t sources = grid.local ? 2 * all.kinds : all.kinds;
    Best found{lists.found, lists.origins, k};
    for (int64_t i = 0; i <= grid.rows; ++i) {
        for (int64_t j = 0; j <= grid.columns; ++j) {
            const int64_t cell = i * all.width + j;
            double* list = lists.scores + cell * k;
            fill_row(list, k, NONE);
            if (!i && !j && !grid.local) list[0] = 0.0;
            double heads[2 * MOST_MOVES], gains[MOST_MOVES];
            int64_t ranks[2 * MOST_MOVES];
            const double* from[MOST_MOVES];
            for (int64_t m = 0; m < all.kinds; ++m) {
                const int64_t a = all.moves[2 * m], b = all.moves[2 * m + 1];
                const bool there = grid.holds(i, j) && grid.holds(i - a, j - b);
                from[m] = lists.scores + (cell - a * all.width - b) * k;
                gains[m] = there ? double(grid.score(i, j, m)) : NONE;
                heads[m] = there && from[m][0] > NONE ? from[m][0] + gains[m] : NONE;
                heads[all.kinds + m] = gains[m];
                ranks[m] = 0;
            }
            for (int64_t n = 0; n < k && (i || j); ++n) {
                int64_t first = 0;
                for (int64_t s = 1; s < sources; ++s) first = heads[s] > heads[first] ? s : first;
                if (!(heads[first] > NONE)) break;
                list[n] = heads[first];
                if (first >= all.kinds) {  // begun in the cell before
                    lists.before[cell * k + n] = first * k, heads[first] = NONE;
                } else {
                    lists.before[cell * k + n] = first * k + ranks[first];
                    const int64_t next = ++ranks[first];
                    heads[first] = next < k && from[first][next] > NONE ? from[first][next] + gains[first] : NONE;
                }
            }
            const bool ends = grid.local || (i == grid.rows && j > grid.columns - all.ends);
            for (int64_t n = 0; ends && n < k && list[n] > NONE; ++n) found.put(list[n], cell * k + n);
        }
    }
    for (int64_t n = 0; n < k; ++n) {
        scores[n] = n < found.filled ? T(found.scores[n]) : -INFINITE<T>;
        int64_t* path = paths + n * steps;
        int64_t count = 0, place = n < found.filled ? found.origins[n] : -1;
        while (place >= 0 && count < steps && (grid.local || place >= k)) {
            const int64_t cell = place / k, source = lists.before[place] / k, rank = lists.before[place] % k, m = source % all.kinds;
            path[count++] = cell * all.kinds + m;
            place = source >= all.kinds ? -1 : (cell - all.moves[2 * m] * all.width - all.moves[2 * m + 1]) * k + rank;
        }
        reversed(path, count, steps);
    }
}

}  // namespace

extern const LatticeKernels lattice_kernels = {{value<float>, sample<float>, best<float>},
                                               {value<double>, sample<double>, best<double>}};

}  // namespace thalweg::THALWEG_LEVEL
