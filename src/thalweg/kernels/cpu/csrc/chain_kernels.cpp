// Linear chains: likelihood and gradient, the best, the k best and samples.
//
// Forward and backward go in the scaled linear domain: exp(A - max A) is taken once; a step is then a product with it,
// an elementwise product with exp(e_t - max e_t) and a factor that undoes the scale of the step before. Scales go into
// float64 sums of logarithms. Up to four items of one matrix go side by side, each forward and back before the next
// ones begin, so that what lies between stays in the cache. Of long chains only the weights where a piece begins are
// kept, and each piece is gone through again on the way back.
//
// A state that falls below the smallest number is lost. With a finite A of range r a step shrinks the weights by
// exp(-r) at most, and the backward weights of any two states differ by exp(r) at most, so what is lost had a posterior
// below exp(2 r) times that smallest number, and nothing needs a look for r <= Limits::range. Otherwise a second row
// goes along whose weights are raised to a floor above all that can be lost: its log Z is too large where that of the
// first is too small, and if the two agree nothing that matters was lost on the way there. On the way back a number
// that is lost counts for no more than itself over the sum of forward and backward weights, which must not be small.
// An item that fails either is computed in the log domain and in float64, at the cost of C^2 exponentials a step.
#include "chain_moves.h"

namespace thalweg::THALWEG_LEVEL {
namespace {

// A sum of float64 that carries what each addition rounds off: log Z of two long chains may differ in its last digits.
struct Total {
    double sum = 0, rest = 0;

    void add(double x) {
        const double next = sum + x, part = next - sum;
        rest += (sum - (next - part)) + (x - part);
        sum = next;
    }
};

template <class T, class Moves>
class Walk {
  public:
    Walk(const Chains<T>& chains, Room<T> room)
        : chains_(chains), size_(chains.size), width_(padded<T>(chains.size)), span_(span_of(chains)), numbers_(room.numbers),
          moves_(chains, numbers_), wide_(room.wide), back_(room.back) {
        last_ = take(width_), floors_ = take(width_);
        after_ = take(GROUP * width_), beta_ = take(GROUP * width_), weights_ = take(GROUP * width_);
        right_ = take(CHUNK * width_);
        kept_ = take(pieces_of(chains) * GROUP * (width_ + 1));
        powers_ = take(GROUP * span_ * width_);
        sums_ = take(GROUP * (span_ + 1)), trail_ = numbers_;  // as long as it must be
        fill_row(after_, 3 * GROUP * width_, T(0));  // sums over edges leave what lies past the labels
    }

    void likelihood(const Likelihood<T>& job, const int64_t* items, int64_t count, Sums& sums) {
        open();
        const bool alone = !Moves::together || chains_.by_item || (job.d_emissions && job.added != MovesOf::all);
        const int64_t most = alone ? 1 : safe_ ? GROUP : GROUP / 2;
        for (int64_t k = 0; k < count; k += most) solve(job, items + k, count - k < most ? count - k : most, sums);
    }

    void viterbi(const int64_t* items, int64_t count, T* scores, int64_t* labels) {
        const int64_t most = Moves::together && !chains_.by_item && chains_.steps <= span_ ? GROUP : 1;
        for (int64_t k = 0; k < count; k += most) {
            const int64_t group = count - k < most ? count - k : most;
            climb(items + k, group);
            for (int64_t g = 0; g < group; ++g) descend(items[k + g], g, scores, labels);
        }
    }

    void sample(int64_t b, int64_t count, const T* uniforms, int64_t* labels) {
        open();
        double log_z;
        const bool scaled = !chains_.by_step && forward(&b, 1, risky(b), &log_z);
        const bool feasible = scaled || log_forward(b) > -INFINITE<double>;
        for (int64_t high = length(b), low; high > 0; high = low) {  // a piece of every sample before the next piece
            low = scaled ? begin_ : 0;
            for (int64_t s = 0; s < count; ++s) {
                const int64_t at = (s * chains_.batch + b) * chains_.steps;
                if (high == length(b))
                    for (int64_t t = 0; t < chains_.steps; ++t) labels[at + t] = -1;
                if (feasible) draw_path(b, scaled, low, high, uniforms + at, labels + at);
            }
            if (low > 0) go_back_to(low - 1, &b, 1);
        }
    }

    void top_k(int64_t b, int64_t k, T* scores, int64_t* labels);

  private:
    T* take(int64_t count) {
        T* found = numbers_;
        numbers_ += count;
        return found;
    }
    int64_t length(int64_t b) const { return chains_.lengths[b]; }
    const T* emissions(int64_t b, int64_t t) const { return chains_.emissions + (b * chains_.steps + t) * size_; }
    // Of position t, which must lie in the piece at hand: row r of its weights, where it has `rows_`; their sum; and the
    // powers of its scores. The weights of the position before the piece are there too.
    T* trail(int64_t t, int64_t r) const { return trail_ + ((t - begin_ + 1) * rows_ + r) * width_; }
    T& sum(int64_t t, int64_t r) const { return sums_[(t - begin_ + 1) * GROUP + r]; }
    T* powers(int64_t t, int64_t g) const { return powers_ + ((t - begin_) * GROUP + g) * width_; }
    T* kept(int64_t piece) const { return kept_ + piece * GROUP * (width_ + 1); }

    void open() {
        const T most = finite_or_zero(max_row(chains_.end, size_));
        last_top_ = most;
        exp_row(chains_.end, size_, most, width_, last_);
        for (int64_t c = 0; c < width_; ++c) floors_[c] = c < size_ ? size_ * Limits<T>::floor : T(0);
        safe_ = safe_range(chains_.end, size_) && (chains_.by_item || moves_.safe(0));
    }
    bool risky(int64_t b) const { return !safe_ || (chains_.by_item && !moves_.safe(b)); }

    // As many as can go together; else one by one, and those that fail in the log domain.
    void solve(const Likelihood<T>& job, const int64_t* items, int64_t count, Sums& sums) {
        double log_z[GROUP];
        if (forward(items, count, risky(items[0]), log_z) && (!job.d_emissions || backward(job, items, count))) {
            if (job.d_emissions && job.added == MovesOf::all) moves_.settle(sums.moves);
            if (job.d_emissions && job.added == MovesOf::item) moves_.settle(job.d_moves + items[0] * chains_.moves);
            for (int64_t g = 0; g < count; ++g) finish(job, items[g], log_z[g], sums);
        } else if (count > 1) {
            for (int64_t g = 0; g < count; ++g) solve(job, items + g, 1, sums);
        } else {
            finish(job, items[0], log_item(job, items[0], sums), sums);
        }
    }

    // out = power * after * factor, at least `floors` where given; the sum of it.
    T step(const T* power, const T* after, T factor, const T* floors, T* out) const {
        Vector<T> sum = fill(T(0));
        for (int64_t c = 0; c < width_; c += LANES<T>) {
            Vector<T> found = load(power + c) * load(after + c) * factor;
            if (floors) found = larger<T>(found, load(floors + c));
            store(out + c, found);
            sum += found;
        }
        return sum_lanes<T>(sum);
    }
    T dot(const T* a, const T* b) const {
        Vector<T> sum = fill(T(0));
        for (int64_t c = 0; c < width_; c += LANES<T>) sum += load(a + c) * load(b + c);
        return sum_lanes<T>(sum);
    }

    // What is found out on the way forward, of each row.
    struct Found {
        Total tops, total;  // maxima of scores, of each item alone; logarithms of scales and maxima of moves
        double scale = 1, end = 0;
    };

    // exp(e_t - max e_t) of the positions of a piece, with the start scores in the first.
    void raise_scores(int64_t b, int64_t g, Found* found) {
        const int64_t stop = length(b) < begin_ + span_ ? length(b) : begin_ + span_;
        for (int64_t t = begin_; t < stop; ++t) {
            const T* given = emissions(b, t);
            if (!t) {
                for (int64_t c = 0; c < size_; ++c) after_[c] = given[c] + chains_.start[c];
                given = after_;
            }
            const T top = finite_or_zero(max_row(given, size_));
            exp_row(given, size_, top, width_, powers(t, g));
            if (found) found->tops.add(top);
        }
    }

    // Forward weights of the piece at hand, each position's over the sum of those before; `found` on the first time.
    void fill_piece(const int64_t* items, int64_t count, Found* found) {
        for (int64_t g = 0; g < count; ++g) raise_scores(items[g], g, found ? found + g : nullptr);
        const int64_t stop = length(items[0]) < begin_ + span_ ? length(items[0]) : begin_ + span_;
        int64_t live = count;
        for (int64_t t = begin_; t < stop; ++t) {
            while (length(items[live - 1]) <= t) --live;
            if (t) {
                moves_.raise(items[0], t - 1);
                moves_.forward(trail(t - 1, 0), rows_ > count ? rows_ : live, after_);
            } else {
                fill_row(after_, GROUP * width_, T(1));
            }
            for (int64_t r = 0; r < rows_; ++r) {
                const int64_t g = r < count ? r : r - count;
                if (g >= live) {
                    fill_row(trail(t, r), width_, T(0));
                    continue;
                }
                // Dividing by the sum of the step before keeps that sum off the critical path.
                const T before = t ? sum(t - 1, r) : T(1);
                sum(t, r) = step(powers(t, g), after_ + r * width_, T(1) / before, r < count ? nullptr : floors_, trail(t, r));
                if (!found) continue;
                double& scale = found[r].scale;
                scale *= before;
                if (!(scale > 1e-200 && scale < 1e200)) found[r].total.add(log_of(scale)), scale = 1;
                if (chains_.by_step && t) found[r].total.add(moves_.top());
                if (t == length(items[g]) - 1) found[r].end = dot(trail(t, r), last_);
            }
        }
    }

    // Forward weights of a group, those of its last piece at hand and of the others where they begin, and log Z of its
    // items; false where something may be lost. A risky group has raised rows beside the plain ones.
    bool forward(const int64_t* items, int64_t count, bool risky, double* log_z) {
        rows_ = risky ? 2 * count : count;
        Found found[GROUP];
        for (int64_t piece = 0;; ++piece) {
            resume(piece);
            fill_piece(items, count, found);
            const int64_t last = begin_ + span_ - 1;
            if (last + 1 >= length(items[0])) break;
            T* next = kept(piece + 1);
            for (int64_t k = 0; k < rows_ * width_; ++k) next[k] = trail(last, 0)[k];
            for (int64_t r = 0; r < rows_; ++r) next[GROUP * width_ + r] = sum(last, r);
        }
        for (int64_t r = 0; r < rows_; ++r) {
            const int64_t g = r < count ? r : r - count;
            Total total = found[g].tops;
            total.add(found[r].total.sum), total.rest += found[r].total.rest;
            total.add(log_of(found[r].scale)), total.add(log_of(found[r].end)), total.add(last_top_);
            if (!chains_.by_step) total.add(double(length(items[g]) - 1) * moves_.top());
            const double value = total.sum + total.rest;
            if (!(value > -INFINITE<double> && value < INFINITE<double>)) return false;
            if (r < count) log_z[r] = value;
            else if (!(value - log_z[g] <= Limits<T>::gap)) return false;
        }
        return true;
    }

    // At the begin of a piece, with the weights of the position before it.
    void resume(int64_t piece) {
        begin_ = piece * span_;
        for (int64_t k = 0; piece && k < rows_ * width_; ++k) trail_[k] = kept(piece)[k];
        for (int64_t r = 0; piece && r < rows_; ++r) sums_[r] = kept(piece)[GROUP * width_ + r];
    }
    void go_back_to(int64_t t, const int64_t* items, int64_t count) {
        resume(t / span_);
        fill_piece(items, count, nullptr);
    }

    // Posteriors of the labels of a group, times its weights, and of its moves; false where something may be lost.
    bool backward(const Likelihood<T>& job, const int64_t* items, int64_t count) {
        const bool by_step = job.added == MovesOf::step;
        const int64_t chunk = by_step ? 1 : CHUNK / rows_;
        const int64_t longest = length(items[0]);
        if (!by_step) moves_.clear();
        int64_t live = 0;
        for (int64_t t = longest - 1; t >= 0; --t) {
            const int64_t moving = live;
            while (live < count && length(items[live]) > t) ++live;
            if (t < begin_) go_back_to(t, items, count);
            if (moving) {
                moves_.raise(items[0], t);
                moves_.backward(weights_, moving, beta_);
            }
            const int64_t place = t - begin_, slot = place % chunk;
            T* right = right_ + slot * rows_ * width_;
            for (int64_t r = 0; r < rows_; ++r) {
                if (r >= moving) fill_row(right + r * width_, width_, T(0));
                if (r < live && !posterior(job, items[r], t, r, r < moving, right + r * width_)) return false;
            }
            if (by_step && moving) {
                const int64_t at = items[0] * (chains_.steps - 1) + t;
                moves_.write(trail(t, 0), right, job.d_moves + at * chains_.moves);
            } else if (!by_step && !slot) {
                const int64_t left = longest - t < span_ - place ? longest - t : span_ - place;
                moves_.add(trail(t, 0), right_, (left < chunk ? left : chunk) * rows_);
            }
        }
        return true;
    }

    // Position t of an item: its posterior, what its moves get beside the forward weights, and what goes further back.
    bool posterior(const Likelihood<T>& job, int64_t b, int64_t t, int64_t g, bool moving, T* right) {
        T *beta = beta_ + g * width_, *weights = weights_ + g * width_;
        const T *here = trail(t, g), *power = powers(t, g);
        if (!moving)
            for (int64_t c = 0; c < width_; ++c) beta[c] = last_[c];
        const T overlap = dot(here, beta);
        if (!(overlap >= Limits<T>::overlap)) return false;
        const T factor = job.weight ? job.weight[b] / overlap : T(1) / overlap;
        // The overlap is the forward sum but for rounding, which is known before: the next step need not wait.
        const T inverse = T(1) / (moving ? sum(t, g) : overlap);
        T* out = job.d_emissions + (b * chains_.steps + t) * size_;
        for (int64_t c = 0; c < width_; c += LANES<T>) {
            const Vector<T> back = load(beta + c);
            if (c < size_) store_some(out + c, load(here + c) * back * factor, size_ - c);
            if (moving) store(right + c, load(weights + c) * factor);
            if (t > 0) store(weights + c, load(power + c) * back * inverse);
        }
        return true;
    }

    // The value of an item; its gold labels taken off its gradient; zeros past its length.
    void finish(const Likelihood<T>& job, int64_t b, double log_z, Sums& sums) {
        const int64_t* gold = job.gold ? job.gold + b * chains_.steps : nullptr;
        double value = log_z;
        if (gold) value = log_z > -INFINITE<double> ? path_score(b, gold) - log_z : INFINITE<double>;
        job.values[b] = T(value);
        sums.value += value;
        if (!job.d_emissions) return;
        const T weight = job.weight ? job.weight[b] : T(1);
        T* own = job.d_emissions + b * chains_.steps * size_;
        const int64_t count = length(b);
        for (int64_t t = 0; gold && t < count; ++t) {
            own[t * size_ + gold[t]] -= weight;
            const int64_t place = t ? moves_.place_of(gold[t - 1], gold[t]) : -1;
            if (place >= 0) add_move(job, b, t - 1, place, -double(weight), sums);
        }
        fill_row(own + count * size_, (chains_.steps - count) * size_, T(0));
        for (int64_t c = 0; c < size_; ++c) {
            sums.start[c] += own[c];
            sums.end[c] += own[(count - 1) * size_ + c];
        }
        if (job.added == MovesOf::step) {
            T* past = job.d_moves + (b * (chains_.steps - 1) + count - 1) * chains_.moves;
            fill_row(past, (chains_.steps - count) * chains_.moves, T(0));
        }
    }
    void add_move(const Likelihood<T>& job, int64_t b, int64_t t, int64_t place, double amount, Sums& sums) const {
        if (job.added == MovesOf::all) sums.moves[place] += amount;
        else job.d_moves[(job.added == MovesOf::item ? b : b * (chains_.steps - 1) + t) * chains_.moves + place] += T(amount);
    }
    double path_score(int64_t b, const int64_t* labels) const {
        const int64_t count = length(b);
        double total = double(chains_.start[labels[0]]) + double(chains_.end[labels[count - 1]]);
        for (int64_t t = 0; t < count; ++t) {
            total += emissions(b, t)[labels[t]];
            if (t) total += moves_.score(b, t - 1, moves_.place_of(labels[t - 1], labels[t]));
        }
        return total;
    }

    // exp(sums - their largest, `most`) in place; the sum of it, 0 where all are -inf.
    static double exp_all(double* sums, int64_t count, double& most) {
        most = max_row(sums, count);
        return most > -INFINITE<double> ? exp_in_place(sums, count, most) : 0;
    }
    double* log_row(int64_t t) const { return wide_ + t * size_; }

    // Log forward weights, each position's relative to its largest; the sum of those, or -inf.
    double log_forward(int64_t b) {
        double total = 0, *sums = log_row(chains_.steps);
        for (int64_t t = 0; t < length(b); ++t) {
            double* row = log_row(t);
            for (int64_t c = 0; c < size_; ++c) {
                row[c] = double(emissions(b, t)[c]) + (t ? 0.0 : double(chains_.start[c]));
                if (!t) continue;
                const int64_t count = moves_.arrivals(c);
                for (int64_t k = 0; k < count; ++k) sums[k] = row[moves_.source(c, k) - size_] + moves_.score(b, t - 1, moves_.place(c, k));
                double most;
                const double sum = exp_all(sums, count, most);
                row[c] = sum > 0 ? row[c] + most + log_of(sum) : -INFINITE<double>;
            }
            const double top = max_row(row, size_);
            if (!(top > -INFINITE<double>)) return -INFINITE<double>;
            total += top;
            for (int64_t c = 0; c < size_; ++c) row[c] -= top;
        }
        return total;
    }

    // log Z of an item, and what `backward` gives, in the log domain.
    double log_item(const Likelihood<T>& job, int64_t b, Sums& sums) {
        if (job.d_emissions) fill_row(job.d_emissions + b * chains_.steps * size_, chains_.steps * size_, T(0));
        if (job.d_emissions && job.added == MovesOf::step)
            fill_row(job.d_moves + b * (chains_.steps - 1) * chains_.moves, (chains_.steps - 1) * chains_.moves, T(0));
        const double total = log_forward(b);
        double *row = log_row(chains_.steps), *beta = row + size_, *shift = beta + size_, *shares = shift + size_;
        for (int64_t c = 0; c < size_; ++c) beta[c] = chains_.end[c];
        const double factor = job.weight ? job.weight[b] : 1.0;
        double log_z = -INFINITE<double>, most;
        for (int64_t t = length(b) - 1; t >= 0 && total > -INFINITE<double>; --t) {
            const bool moving = t < length(b) - 1;
            if (moving) log_back(b, t, beta, shift, shares);
            const double* here = log_row(t);
            for (int64_t c = 0; c < size_; ++c) row[c] = here[c] + beta[c];
            const double norm = exp_all(row, size_, most);
            if (!(norm > 0)) return -INFINITE<double>;
            if (!moving) log_z = total + most + log_of(norm);
            if (!job.d_emissions) return log_z;
            T* out = job.d_emissions + (b * chains_.steps + t) * size_;
            for (int64_t c = 0; c < size_; ++c) out[c] = T(factor * (row[c] / norm));
            if (moving) {
                for (int64_t c = 0; c < size_; ++c) shift[c] += here[c] - most;
                exp_in_place(shift, size_, 0.0);
                each_move([&](int64_t from, int64_t, int64_t place, int64_t n) {
                    const double share = shift[from] * shares[n] / norm;
                    if (share > 0) add_move(job, b, t, place, factor * share, sums);
                });
            }
            const double top = max_row(beta, size_);
            for (int64_t c = 0; c < size_; ++c) beta[c] -= top;
        }
        return log_z;
    }
    // Calls move(from, to, place, n) for all of them, the n-th by target, then source.
    template <class Move>
    void each_move(Move move) const {
        for (int64_t to = 0, n = 0; to < size_; ++to)
            for (int64_t k = 0; k < moves_.arrivals(to); ++k) move(moves_.source(to, k), to, moves_.place(to, k), n++);
    }
    // Log backward weights of t from those of t + 1. They are the logarithms of sums of exp(shift[from]) shares[n].
    void log_back(int64_t b, int64_t t, double* beta, double* shift, double* shares) const {
        for (int64_t c = 0; c < size_; ++c) beta[c] += emissions(b, t + 1)[c], shift[c] = -INFINITE<double>;
        each_move([&](int64_t from, int64_t to, int64_t place, int64_t n) {
            shares[n] = moves_.score(b, t, place) + beta[to];
            if (shares[n] > shift[from]) shift[from] = shares[n];
        });
        each_move([&](int64_t from, int64_t, int64_t, int64_t n) { shares[n] -= finite_or_zero(shift[from]); });
        exp_in_place(shares, chains_.moves, 0.0);
        fill_row(beta, size_, 0.0);
        each_move([&](int64_t from, int64_t, int64_t, int64_t n) { beta[from] += shares[n]; });
        for (int64_t c = 0; c < size_; ++c) beta[c] = shift[c] + log_of(beta[c]);  // log 0 is -inf
    }

    // Highest scores of a group at every position, relative to the largest of the one before: float32 keeps its digits
    // along any length. No back-pointers: those of the one path that is wanted are found on the way back.
    void climb(const int64_t* items, int64_t count) {
        rows_ = count, begin_ = 0;
        T tops[GROUP];
        for (int64_t g = 0; g < count; ++g) {
            T* row = trail(0, g);
            fill_row(row, width_, -INFINITE<T>);
            for (int64_t c = 0; c < size_; ++c) row[c] = emissions(items[g], 0)[c] + chains_.start[c];
            tops[g] = finite_or_zero(max_row(row, size_));
        }
        int64_t live = count;
        for (int64_t t = 1; t < length(items[0]); ++t) {
            while (length(items[live - 1]) <= t) --live;
            moves_.spread(items[0], t - 1);
            moves_.highest(trail(t - 1, 0), live, after_);
            for (int64_t g = 0; g < live; ++g) {
                const T* given = emissions(items[g], t);
                Vector<T> most = fill(-INFINITE<T>);
                for (int64_t c = 0; c < width_; c += LANES<T>) {
                    const Vector<T> found = load(after_ + g * width_ + c) - tops[g] + load_some(given + c, size_ - c, -INFINITE<T>);
                    store(trail(t, g) + c, found);
                    most = larger<T>(found, most);
                }
                tops[g] = finite_or_zero(max_lanes<T>(most));
            }
        }
    }
    void descend(int64_t b, int64_t g, T* scores, int64_t* labels) {
        const int64_t count = length(b);
        int64_t* path = labels + b * chains_.steps;
        for (int64_t t = count; t < chains_.steps; ++t) path[t] = -1;
        for (int64_t c = 0; c < size_; ++c) after_[c] = trail(count - 1, g)[c] + chains_.end[c];
        path[count - 1] = first_of(after_, size_);
        for (int64_t t = count - 1; t > 0; --t) {
            moves_.spread(b, t - 1);
            path[t - 1] = moves_.origin(trail(t - 1, g), path[t], after_);
        }
        scores[b] = T(path_score(b, path));
    }

    void draw_path(int64_t b, bool scaled, int64_t low, int64_t high, const T* uniforms, int64_t* labels) {
        double* sums = log_row(chains_.steps);
        for (int64_t t = high - 1; t >= low; --t) {
            const bool last = t == length(b) - 1;
            const int64_t to = last ? 0 : labels[t + 1], count = last ? size_ : moves_.arrivals(to);
            for (int64_t k = 0; k < count; ++k) {
                const int64_t from = last ? k : moves_.source(to, k);
                if (scaled) sums[k] = double(trail(t, 0)[from]) * double(last ? last_[k] : moves_.power(to, k));
                else sums[k] = log_row(t)[from] + (last ? double(chains_.end[k]) : moves_.score(b, t, moves_.place(to, k)));
            }
            double most;
            if (!scaled && !(exp_all(sums, count, most) > 0)) return;
            const int64_t found = drawn(sums, count, uniforms[t]);
            labels[t] = last ? found : moves_.source(to, found);
        }
    }

    const Chains<T>& chains_;
    int64_t size_, width_, span_, rows_ = 0, begin_ = 0;  // the piece at hand begins there
    T* numbers_;
    Moves moves_;
    double* wide_;
    int64_t* back_;
    T *last_, *floors_, *after_, *beta_, *weights_, *right_, *kept_, *powers_, *sums_, *trail_;
    double last_top_ = 0;
    bool safe_ = false;
};

template <class T, class Moves>
void Walk<T, Moves>::top_k(int64_t b, int64_t k, T* scores, int64_t* labels) {
    const int64_t count = length(b), block = size_ * k;
    double *old = wide_, *fresh = wide_ + block;
    for (int64_t c = 0; c < size_; ++c) {
        fill_row(old + c * k, k, -INFINITE<double>);
        old[c * k] = double(emissions(b, 0)[c]) + double(chains_.start[c]);
    }
    for (int64_t t = 1; t <= count; ++t) {  // the last list is of the ends of paths
        if (t < count) moves_.spread(b, t - 1);
        for (int64_t c = 0; c < (t < count ? size_ : 1); ++c) {
            Best best{fresh + c * k, back_ + t * block + c * k, k};  // from label * k + rank
            const int64_t ways = t < count ? moves_.arrivals(c) : size_;
            for (int64_t n = 0; n < ways; ++n) {
                const int64_t from = t < count ? moves_.source(c, n) : n;
                const double move = t < count ? moves_.power(c, n) : chains_.end[n];
                for (int64_t r = 0; r < k && best.put(old[from * k + r] + move, from * k + r); ++r) {
                }
            }
            fill_row(best.scores + best.filled, k - best.filled, -INFINITE<double>);
            for (int64_t r = 0; t < count && r < k; ++r) fresh[c * k + r] += emissions(b, t)[c];
        }
        double* const other = old;
        old = fresh, fresh = other;
    }
    for (int64_t r = 0; r < k; ++r) {
        int64_t* path = labels + (b * k + r) * chains_.steps;
        for (int64_t t = 0; t < chains_.steps; ++t) path[t] = -1;
        scores[b * k + r] = T(old[r]);
        if (!(old[r] > -INFINITE<double>)) continue;
        for (int64_t t = count, from = r; t > 0; --t) {
            from = back_[t * block + from];
            path[t - 1] = from / k;
        }
        scores[b * k + r] = T(path_score(b, path));
    }
}

template <class T, class Function>
void walk(const Chains<T>& chains, Room<T> room, Function function) {
    if (chains.edges.into) {
        Walk<T, Sparse<T>> own(chains, room);
        function(own);
    } else {
        Walk<T, Dense<T>> own(chains, room);
        function(own);
    }
}

template <class T>
constexpr ChainKernelsOf<T> table() {
    return {
        [](const Chains<T>& chains, const Likelihood<T>& job, const int64_t* items, int64_t count, Sums& sums, Room<T> room) {
            walk(chains, room, [&](auto& own) { own.likelihood(job, items, count, sums); });
        },
        [](const Chains<T>& chains, const int64_t* items, int64_t count, T* scores, int64_t* labels, Room<T> room) {
            walk(chains, room, [&](auto& own) { own.viterbi(items, count, scores, labels); });
        },
        [](const Chains<T>& chains, int64_t item, int64_t k, T* scores, int64_t* labels, Room<T> room) {
            walk(chains, room, [&](auto& own) { own.top_k(item, k, scores, labels); });
        },
        [](const Chains<T>& chains, int64_t item, int64_t count, const T* uniforms, int64_t* labels, Room<T> room) {
            walk(chains, room, [&](auto& own) { own.sample(item, count, uniforms, labels); });
        },
    };
}

}  // namespace

extern const ChainKernels chain_kernels = {table<float>(), table<double>()};

}  // namespace thalweg::THALWEG_LEVEL
