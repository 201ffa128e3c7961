// Segmentations: likelihood and gradient, the best and samples.
//
// With S_t(c) the sum of the content before position t, E_t(c) what leads to a segment of c at t and v_t = E_t - S_t,
//
//     A_t(c) = S_t(c) + log sum_d exp(v_{t-d}(c) + D(d, c)),   E_t(c) = b_t(c) + log sum_i exp(A_t(i) + M(i, c))
//
// so one position costs K products and C products a label, of numbers u = exp(v - reference) and exp(D - max D): the
// exponentials are C a position, not K C. Content is taken relative to its largest at each position, which every
// segmentation pays alike.
//
// What underflows is lost; a sum that is at least SMALL has lost nothing that counts, for what is lost is below the
// smallest number. Otherwise the reference of the label moves, and a sum that is small even then is made in the log
// domain, by K exponentials. Content of -inf counts 0 in S, and the sums of the labels that it bounds go there too.
//
// The gradient is the same walk back: the mass of segments that end at t goes to where they begin in the proportions of
// the terms of A_t, and on to the segments before in those of E_t. Nothing is a difference of large numbers.
#include "segments.h"
#include "simd.h"

namespace thalweg::THALWEG_LEVEL {
namespace {

constexpr double NONE = -INFINITE<double>;
constexpr double HIGH = 100, LOW = -460;  // logarithms between which products of weights and their inverses are safe
constexpr double SMALL = 1e-200;          // about exp(LOW)
constexpr int64_t L = LANES<double>;

class Walk {
  public:
    Walk(const Segments& given, int64_t item, double* room)
        : size_(given.size), width_(given.width()), most_(given.most), steps_(given.steps), count_(given.lengths[item]),
          parts_(given.parts + item * steps_ * 2 * size_), durations_(given.durations + item * given.by_item),
          moves_(given.moves + item * given.moves_by_item), room_(room) {
        sums_ = take(steps_ + 1), entries_ = take(steps_ + 1), ends_ = take(steps_ + 1), firsts_ = take(steps_ + 1);
        weights_ = take(steps_ + 1), begun_ = take(steps_ + 1);
        lasting_ = take(most_), powers_ = take(size_);
        across_ = take(size_), references_ = take(1), row_ = take(1), total_ = take(1);
        raw_ = take(most_), exact_ = take(most_), raw_moves_ = take(size_), exact_moves_ = take(size_);
        mass_ = take(1), inside_ = take(1), share_ = take(1), spread_ = take(1);
        terms_ = room_;
        for (int64_t c = 0; c < width_; ++c) sums_[c] = firsts_[c] = references_[c] = 0;
    }

    double likelihood(const SegmentGradient& gradient) {
        raise();
        const double log_z = forward();
        if (gradient.parts) backward(gradient, log_z > NONE);
        return log_z;
    }

    void viterbi(int64_t* labels) {
        climb();
        for (int64_t t = 0; t < steps_; ++t) labels[t] = -1;
        for (int64_t c = 0; c < size_; ++c) row_[c] = at(ends_, count_)[c] + at(sums_, count_)[c];
        if (!(max_row(row_, size_) > NONE)) return;
        int64_t label = first_of(row_, size_);
        for (int64_t past = count_; past > 0;) {
            int64_t d = 1;
            while (d < past - lowest(past, label) && before(past, d, label) < at(ends_, past)[label]) ++d;
            past = mark(labels, past - d, past, label);
            for (int64_t c = 0; past && c < size_; ++c) row_[c] = at(ends_, past)[c] + at(sums_, past)[c] + moves_[c * size_ + label];
            if (past) label = first_of(row_, size_);
        }
    }

    void sample(int64_t number, int64_t apart, const double* uniforms, int64_t* labels) {
        raise();
        const bool feasible = forward() > NONE;
        for (int64_t s = 0; s < number; ++s, labels += apart, uniforms += 2 * apart) {
            for (int64_t t = 0; t < steps_; ++t) labels[t] = -1;
            if (!feasible) continue;
            for (int64_t c = 0; c < size_; ++c) terms_[c] = at(ends_, count_)[c] + at(sums_, count_)[c];
            log_sum(size_);
            int64_t label = drawn(terms_, size_, uniforms[2 * count_ - 2]);
            for (int64_t past = count_; past > 0;) {
                close(past, label);
                const int64_t low = lowest(past, label);
                const int64_t first = past - 1 - drawn(terms_, past - low, uniforms[2 * past - 1]);
                const int64_t own = label;
                if (first) {
                    enter(first, label);
                    label = drawn(terms_, size_, uniforms[2 * first - 2]);
                }
                past = mark(labels, first, past, own);
            }
        }
    }

  private:
    double* take(int64_t rows) {
        double* found = room_;
        room_ += rows * width_;
        return found;
    }
    double* at(double* rows, int64_t t) const { return rows + t * width_; }
    const double* content(int64_t t) const { return parts_ + t * 2 * size_; }
    const double* begins(int64_t t) const { return content(t) + size_; }
    // Where the longest segment of a label that ends at t may begin.
    int64_t lowest(int64_t t, int64_t c) const {
        const int64_t bound = int64_t(at(firsts_, t)[c]), low = t > most_ ? t - most_ : 0;
        return bound > low ? bound : low;
    }
    bool bounded(int64_t t, int64_t c) const { return at(firsts_, t)[c] > double(t > most_ ? t - most_ : 0); }
    // The term of segments of d positions in A_t - S_t; nothing where content forbids.
    double before(int64_t t, int64_t d, int64_t c) const {
        return t - d < lowest(t, c) ? NONE : at(entries_, t - d)[c] + durations_[(d - 1) * size_ + c];
    }
    int64_t mark(int64_t* labels, int64_t first, int64_t past, int64_t label) const {
        for (int64_t t = first; t < past; ++t) labels[t] = t == first ? label : size_ + label;
        return first;
    }

    // exp(durations - their largest), exp(moves - their largest), and this across.
    void raise() {
        longest_ = finite_or_zero(max_row(durations_, most_ * size_)), highest_ = finite_or_zero(max_row(moves_, size_ * size_));
        for (int64_t d = 0; d < most_; ++d) exp_row(durations_ + d * size_, size_, longest_, width_, at(lasting_, d));
        for (int64_t i = 0; i < size_; ++i) {
            exp_row(moves_ + i * size_, size_, highest_, width_, at(powers_, i));
            for (int64_t c = 0; c < size_; ++c) at(across_, c)[i] = at(powers_, i)[c];
        }
        for (int64_t c = 0; c < size_; ++c)
            for (int64_t i = size_; i < width_; ++i) at(across_, c)[i] = 0;
    }

    // S of the position after t and where segments that cover it begin at the earliest; what was taken off.
    double extend(int64_t t) {
        const double* given = content(t);
        const double top = finite_or_zero(max_row(given, size_));
        const double *old = at(sums_, t), *first = at(firsts_, t);
        double *sums = at(sums_, t + 1), *next = at(firsts_, t + 1);
        for (int64_t c = 0; c < width_; ++c) {
            const bool forbidden = c < size_ && !(given[c] > NONE);
            sums[c] = c < size_ && !forbidden ? old[c] + (given[c] - top) : old[c];
            next[c] = forbidden ? double(t + 1) : first[c];
        }
        return top;
    }

    // exp(x - most) of the terms in place, which `log_sum` returns the logarithm of the sum of; -inf where all are.
    double log_sum(int64_t count) {
        const double top = max_row(terms_, count), sum = exp_in_place(terms_, count, finite_or_zero(top));
        terms_sum_ = sum > 0 ? sum : 1;
        return top > NONE ? top + log_of(sum) : NONE;
    }
    // A_t - S_t and E_t of a label in the log domain; the terms, by rising d or i, are left.
    double close(int64_t t, int64_t c) {
        const int64_t count = t - lowest(t, c);
        for (int64_t d = 1; d <= count; ++d) terms_[d - 1] = at(entries_, t - d)[c] + durations_[(d - 1) * size_ + c];
        return log_sum(count);
    }
    double enter(int64_t t, int64_t c) {
        for (int64_t i = 0; i < size_; ++i) terms_[i] = at(ends_, t)[i] + at(sums_, t)[i] + moves_[i * size_ + c];
        return begins(t)[c] + log_sum(size_);
    }

    // Another reference for the weights of a label that began at low .. high: `wanted`, if none becomes too large.
    void refer(int64_t c, int64_t low, int64_t high, double wanted) {
        for (int64_t s = low; s <= high; ++s) wanted = at(entries_, s)[c] - HIGH > wanted ? at(entries_, s)[c] - HIGH : wanted;
        references_[c] = wanted;
        for (int64_t s = low; s <= high; ++s) at(weights_, s)[c] = exp_of(at(entries_, s)[c] - wanted);
    }
    // Weights of what begins at s, which joins those that began at low .. high.
    void weigh(int64_t s, int64_t low, int64_t high) {
        const double* given = at(entries_, s);
        for (int64_t c = 0; c < width_; c += L) store(at(weights_, s) + c, exp<double>(load(given + c) - load(references_ + c)));
        for (int64_t c = 0; c < size_; ++c)
            if (given[c] - references_[c] > HIGH) refer(c, low, high, given[c]);
    }

    // E_t from A_t, in entries_ less S_t; `spread_` are the weights of the segments before, relative to `top_`.
    void spread(int64_t t) {
        for (int64_t c = 0; c < width_; ++c) row_[c] = c < size_ ? at(ends_, t)[c] + at(sums_, t)[c] : NONE;
        top_ = max_row(row_, size_);
        exp_row(row_, size_, finite_or_zero(top_), width_, spread_);
    }
    void arrive(int64_t t) {
        double* entries = at(entries_, t);
        const double *sums = at(sums_, t), *given = begins(t);
        if (t) {
            spread(t);
            product(Rows<double>{spread_, width_}, powers_, width_, 1, size_, width_, total_, width_);
        }
        for (int64_t c = 0; c < width_; c += L) {
            Vector<double> found = load_some(given + c, size_ - c, NONE) - load(sums + c);
            if (t) found += log<double>(load(total_ + c)) + (finite_or_zero(top_) + highest_);
            store(entries + c, found);
        }
        for (int64_t c = 0; t && c < size_; ++c)
            if (!(total_[c] >= SMALL)) entries[c] = enter(t, c) - sums[c];
    }

    double forward() {
        double tops = 0;
        for (int64_t t = 0; t < count_; ++t) {
            const int64_t past = t + 1, low = past > most_ ? past - most_ : 0;
            arrive(t);
            weigh(t, low, t);
            tops += extend(t);
            window(past, past - low);
            double* ends = at(ends_, past);
            for (int64_t c = 0; c < width_; c += L)
                store(ends + c, log<double>(load(total_ + c)) + load(references_ + c) + longest_);
            for (int64_t c = 0; c < size_; ++c) {
                if (total_[c] >= SMALL && !bounded(past, c)) continue;
                ends[c] = close(past, c);
                if (!bounded(past, c) && ends[c] > NONE) refer(c, low, t, ends[c] - longest_);
            }
        }
        for (int64_t c = 0; c < size_; ++c) terms_[c] = at(ends_, count_)[c] + at(sums_, count_)[c];
        return tops + log_sum(size_);
    }
    // total = sum_d weights(past - d) lasting(d), by four sums that do not wait for one another.
    void window(int64_t past, int64_t count) {
        for (int64_t c = 0; c < width_; c += L) {
            const double *u = at(weights_, past - 1) + c, *w = lasting_ + c;
            Vector<double> sums[4] = {fill(0.0), fill(0.0), fill(0.0), fill(0.0)};
            int64_t d = 0;
            for (; d + 4 <= count; d += 4)
                for (int k = 0; k < 4; ++k) sums[k] += load(u - (d + k) * width_) * load(w + (d + k) * width_);
            for (; d < count; ++d) sums[0] += load(u - d * width_) * load(w + d * width_);
            store(total_ + c, (sums[0] + sums[1]) + (sums[2] + sums[3]));
        }
    }

    void backward(const SegmentGradient& out, bool feasible) {
        fill_row(out.parts, steps_ * 2 * size_, 0.0);
        clear(begun_, steps_ + 1), clear(raw_, most_), clear(exact_, most_);
        clear(raw_moves_, size_), clear(exact_moves_, size_), clear(inside_, 1), clear(mass_, 1);
        for (int64_t c = 0; feasible && c < size_; ++c) mass_[c] = terms_[c] / terms_sum_;
        for (int64_t past = count_; feasible && past > 0; --past) {
            const int64_t t = past - 1;
            give_back(past);
            double *begun = at(begun_, t), *own = out.parts + t * 2 * size_;
            for (int64_t c = 0; c < size_; ++c) {
                inside_[c] = content(t)[c] > NONE ? inside_[c] + mass_[c] : 0.0;
                own[c] = inside_[c] > 0 ? inside_[c] : 0.0;
                own[size_ + c] = begun[c];
                inside_[c] -= begun[c];
            }
            if (!t) break;
            leave(t);
            if (t > most_ - 1) weigh(t - most_, t - most_, t - 1);
        }
        for (int64_t d = 0; d < most_; ++d)
            for (int64_t c = 0; c < size_; ++c)
                out.durations[d * size_ + c] = at(raw_, d)[c] * at(lasting_, d)[c] + at(exact_, d)[c];
        for (int64_t i = 0; i < size_; ++i)
            for (int64_t c = 0; c < size_; ++c)
                out.moves[i * size_ + c] = at(raw_moves_, i)[c] * at(powers_, i)[c] + at(exact_moves_, i)[c];
    }
    void clear(double* rows, int64_t count) const { fill_row(rows, count * width_, 0.0); }
    // The mass of segments that end at `past` to where they begin.
    void give_back(int64_t past) {
        const int64_t low = past > most_ ? past - most_ : 0, count = past - low;
        const double* ends = at(ends_, past);
        for (int64_t c = 0; c < size_; ++c) {
            if (mass_[c] > 0 && !bounded(past, c) && ends[c] - longest_ - references_[c] < LOW)
                refer(c, low, past - 1, ends[c] - longest_);
            share_[c] = mass_[c] > 0 ? references_[c] + longest_ - ends[c] : NONE;
            if (!(mass_[c] > 0) || (share_[c] <= -LOW && !bounded(past, c))) continue;
            share_[c] = NONE;
            close(past, c);
            for (int64_t d = 1; d <= past - lowest(past, c); ++d) {
                const double part = mass_[c] * (terms_[d - 1] / terms_sum_);
                at(exact_, d - 1)[c] += part, at(begun_, past - d)[c] += part;
            }
        }
        for (int64_t c = size_; c < width_; ++c) share_[c] = NONE;
        for (int64_t c = 0; c < width_; c += L) {
            const Vector<double> factor = load(mass_ + c) * exp<double>(load(share_ + c));
            const double *u = at(weights_, past - 1) + c, *w = lasting_ + c;
            double *raw = raw_ + c, *begun = at(begun_, past - 1) + c;
            for (int64_t d = 0; d < count; ++d, u -= width_, w += width_, raw += width_, begun -= width_) {
                const Vector<double> part = factor * load(u);
                store(raw, load(raw) + part);
                store(begun, load(begun) + part * load(w));
            }
        }
    }
    // The mass of segments that begin at t to the labels of those that end there.
    void leave(int64_t t) {
        const double *begun = at(begun_, t), *entries = at(entries_, t), *sums = at(sums_, t);
        spread(t);
        clear(mass_, 1);
        for (int64_t c = 0; c < size_; ++c) {
            share_[c] = begun[c] > 0 ? top_ + highest_ + begins(t)[c] - (entries[c] + sums[c]) : NONE;
            if (share_[c] <= -LOW) continue;
            share_[c] = NONE;
            enter(t, c);
            for (int64_t i = 0; i < size_; ++i) {
                const double part = begun[c] * (terms_[i] / terms_sum_);
                at(exact_moves_, i)[c] += part, mass_[i] += part;
            }
        }
        for (int64_t c = size_; c < width_; ++c) share_[c] = NONE;
        for (int64_t c = 0; c < width_; c += L) store(share_ + c, load(begun + c) * exp<double>(load(share_ + c)));
        product(Rows<double>{share_, width_}, across_, width_, 1, size_, width_, total_, width_);
        for (int64_t i = 0; i < size_; ++i) {
            mass_[i] += spread_[i] * total_[i];
            double* raw = at(raw_moves_, i);
            for (int64_t c = 0; c < width_; c += L) store(raw + c, load(raw + c) + spread_[i] * load(share_ + c));
        }
    }

    // Highest scores where segments end, as A_t - S_t; no back-pointers: those of one path are found on the way back.
    void climb() {
        for (int64_t i = 0; i < size_; ++i)
            for (int64_t c = 0; c < width_; ++c) at(powers_, i)[c] = c < size_ ? moves_[i * size_ + c] : NONE;
        for (int64_t d = 0; d < most_; ++d)
            for (int64_t c = 0; c < width_; ++c) at(lasting_, d)[c] = c < size_ ? durations_[d * size_ + c] : NONE;
        for (int64_t t = 0; t < count_; ++t) {
            const int64_t past = t + 1, count = past > most_ ? most_ : past;
            double *entries = at(entries_, t), *ends = at(ends_, past);
            if (t) {
                for (int64_t c = 0; c < width_; ++c) row_[c] = c < size_ ? at(ends_, t)[c] + at(sums_, t)[c] : NONE;
                product<MaxPlus>(Rows<double>{row_, width_}, powers_, width_, 1, size_, width_, total_, width_);
            }
            for (int64_t c = 0; c < width_; ++c)
                entries[c] = c < size_ ? begins(t)[c] + (t ? total_[c] : 0.0) - at(sums_, t)[c] : NONE;
            extend(t);
            for (int64_t c = 0; c < width_; c += L) {
                Vector<double> best = fill(NONE);
                for (int64_t d = 0; d < count; ++d)
                    best = larger<double>(load(entries - d * width_ + c) + load(at(lasting_, d) + c), best);
                store(ends + c, best);
            }
            for (int64_t c = 0; c < size_; ++c) {
                if (!bounded(past, c)) continue;
                ends[c] = NONE;
                for (int64_t d = 1; d <= past - lowest(past, c); ++d) ends[c] = before(past, d, c) > ends[c] ? before(past, d, c) : ends[c];
            }
        }
    }

    int64_t size_, width_, most_, steps_, count_;
    const double *parts_, *durations_, *moves_;
    double* room_;
    // By position: S; v; A - S of those that end there; the first position that content allows; u; mass that begins.
    double *sums_, *entries_, *ends_, *firsts_, *weights_, *begun_;
    double *lasting_, *powers_, *across_, *references_, *row_, *total_;
    double *raw_, *exact_, *raw_moves_, *exact_moves_, *mass_, *inside_, *share_, *spread_, *terms_;
    double longest_ = 0, highest_ = 0, top_ = 0, terms_sum_ = 1;
};

}  // namespace

extern const SegmentKernels segment_kernels = {
    [](const Segments& given, int64_t item, const SegmentGradient& gradient, double* room) {
        return Walk(given, item, room).likelihood(gradient);
    },
    [](const Segments& given, int64_t item, int64_t* labels, double* room) { Walk(given, item, room).viterbi(labels); },
    [](const Segments& given, int64_t item, int64_t count, int64_t apart, const double* uniforms, int64_t* labels,
       double* room) { Walk(given, item, room).sample(count, apart, uniforms, labels); },
};

}  // namespace thalweg::THALWEG_LEVEL
