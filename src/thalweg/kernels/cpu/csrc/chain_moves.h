// The moves of a chain as the kernels see them: every pair of labels, or a list of edges. Both have the same members.
#pragma once

#include "chain.h"
#include "simd.h"

namespace thalweg::THALWEG_LEVEL {
namespace {

// What a floating type leaves room for.
template <class T>
struct Limits;
template <>
struct Limits<float> {
    static constexpr double range = 25, gap = 1e-6;  // of scores that need no check; of log Z with and without a floor
    static constexpr float floor = 4e-38f;           // of each label: above e^-87, where powers end
    static constexpr float overlap = 1e-15f;         // the least that forward and backward weights share
};
template <>
struct Limits<double> {
    static constexpr double range = 200, gap = 1e-12, floor = 1e-307, overlap = 1e-100;
};

template <class T>
inline bool safe_range(const T* x, int64_t count) {
    Vector<T> low = fill(INFINITE<T>), high = fill(-INFINITE<T>);
    for (int64_t i = 0; i < count; i += LANES<T>) {
        high = larger<T>(load_some(x + i, count - i, -INFINITE<T>), high);
        const Vector<T> lower = load_some(x + i, count - i, INFINITE<T>);
        low = lower < low ? lower : low;
    }
    return double(max_lanes<T>(high)) + double(max_lanes<T>(-low)) <= Limits<T>::range;  // false for infinite ranges
}

// A matrix of scores for all, for each item or for each step.
template <class T>
class Dense {
  public:
    static constexpr bool together = true;  // items may go side by side
    Dense(const Chains<T>& chains, T*& room)
        : chains_(chains), size_(chains.size), width_(padded<T>(chains.size)), power_(room), back_(power_ + size_ * width_),
          total_(back_ + size_ * width_) {
        room = total_ + size_ * width_;
    }

    double top() const { return top_; }

    bool safe(int64_t b) const {
        const int64_t matrices = chains_.by_step ? chains_.lengths[b] - 1 : chains_.steps > 1;
        for (int64_t t = 0; t < matrices; ++t)
            if (!safe_range(scores(b, t), chains_.moves)) return false;
        return true;
    }
    // exp(A - max A) of a step, and its transpose.
    void raise(int64_t b, int64_t t) {
        const T* given = scores(b, t);
        if (given == raised_) return;
        raised_ = given;
        const T most = finite_or_zero(max_row(given, chains_.moves));
        top_ = most;
        for (int64_t i = 0; i < size_; ++i) exp_row(given + i * size_, size_, most, width_, power_ + i * width_);
        transpose(T(0));
    }
    // A itself, and its transpose.
    void spread(int64_t b, int64_t t) {
        const T* given = scores(b, t);
        if (given == raised_) return;
        raised_ = given;
        for (int64_t i = 0; i < size_; ++i)
            for (int64_t j = 0; j < width_; ++j) power_[i * width_ + j] = j < size_ ? given[i * size_ + j] : -INFINITE<T>;
        transpose(-INFINITE<T>);
    }
    void forward(const T* rows, int64_t count, T* out) const {
        product(Rows<T>{rows, width_}, power_, width_, count, size_, width_, out, width_);
    }
    void backward(const T* rows, int64_t count, T* out) const {
        product(Rows<T>{rows, width_}, back_, width_, count, size_, width_, out, width_);
    }
    void highest(const T* rows, int64_t count, T* out) const {
        product<MaxPlus>(Rows<T>{rows, width_}, power_, width_, count, size_, width_, out, width_);
    }
    // The lowest source from which the highest sum leads to `label`.
    int64_t origin(const T* row, int64_t label, T* sums) const {
        const T* scores = back_ + label * width_;
        for (int64_t i = 0; i < width_; i += LANES<T>) store(sums + i, load(row + i) + load(scores + i));
        return first_of(sums, size_);
    }

    void clear() { fill_row(total_, size_ * width_, T(0)); }
    void add(const T* left, const T* right, int64_t rows) {
        product<SumProduct, true>(Rows<T>{left, 1, width_}, right, width_, size_, rows, width_, total_, width_);
    }
    template <class To>
    void settle(To* out) const {  // what was added since `clear`, times the power; nothing where no step was made
        for (int64_t i = 0; raised_ && i < size_; ++i)
            for (int64_t j = 0; j < size_; ++j) out[i * size_ + j] += To(total_[i * width_ + j]) * power_[i * width_ + j];
    }
    void write(const T* left, const T* right, T* out) const {
        for (int64_t i = 0; i < size_; ++i)
            for (int64_t j = 0; j < size_; ++j) out[i * size_ + j] = left[i] * power_[i * width_ + j] * right[j];
    }

    // Moves into a label one by one, for what is done in float64: how many, and of each its source, its place among the
    // scores, and what was raised or spread.
    int64_t arrivals(int64_t) const { return size_; }
    int64_t source(int64_t, int64_t k) const { return k; }
    int64_t place(int64_t to, int64_t k) const { return k * size_ + to; }
    T power(int64_t to, int64_t k) const { return back_[to * width_ + k]; }
    int64_t place_of(int64_t from, int64_t to) const { return from * size_ + to; }
    double score(int64_t b, int64_t t, int64_t place) const { return scores(b, t)[place]; }

  private:
    const T* scores(int64_t b, int64_t t) const { return chains_.transitions + b * chains_.by_item + t * chains_.by_step; }
    void transpose(T rest) {
        for (int64_t j = 0; j < size_; ++j)
            for (int64_t i = 0; i < width_; ++i) back_[j * width_ + i] = i < size_ ? power_[i * width_ + j] : rest;
    }

    const Chains<T>& chains_;
    int64_t size_, width_;
    T *power_, *back_, *total_;
    const T* raised_ = nullptr;
    double top_ = 0;
};

// Edges, the same for all items; every other move is impossible.
template <class T>
class Sparse {
  public:
    static constexpr bool together = false;
    Sparse(const Chains<T>& chains, T*& room)
        : chains_(chains), edges_(chains.edges), size_(chains.size), width_(padded<T>(chains.size)), power_(room),
          total_(room + padded<T>(chains.moves)) {
        room = total_ + padded<T>(chains.moves);
    }

    double top() const { return top_; }
    bool safe(int64_t) const { return false; }
    void raise(int64_t, int64_t) {
        if (raised_) return;
        raised_ = true;
        const T most = finite_or_zero(max_row(chains_.transitions, chains_.moves));
        top_ = most;
        exp_row(chains_.transitions, chains_.moves, most, padded<T>(chains_.moves), power_);
    }
    void spread(int64_t, int64_t) { power_ = const_cast<T*>(chains_.transitions); }  // only read from here on
    void forward(const T* rows, int64_t count, T* out) const {
        for (int64_t r = 0; r < count; ++r, rows += width_, out += width_) {
            for (int64_t j = 0; j < size_; ++j) {
                T sum = 0;
                for (int64_t k = edges_.into[j]; k < edges_.into[j + 1]; ++k) sum += power_[k] * rows[edges_.sources[k]];
                out[j] = sum;
            }
        }
    }
    void backward(const T* rows, int64_t count, T* out) const {
        for (int64_t r = 0; r < count; ++r, rows += width_, out += width_) {
            fill_row(out, size_, T(0));
            for (int64_t k = 0; k < chains_.moves; ++k) out[edges_.sources[k]] += power_[k] * rows[edges_.targets[k]];
        }
    }
    void highest(const T* rows, int64_t count, T* out) const {
        for (int64_t r = 0; r < count; ++r, rows += width_, out += width_) {
            fill_row(out, width_, -INFINITE<T>);
            for (int64_t k = 0; k < chains_.moves; ++k) {
                const T sum = rows[edges_.sources[k]] + chains_.transitions[k];
                if (sum > out[edges_.targets[k]]) out[edges_.targets[k]] = sum;
            }
        }
    }
    int64_t origin(const T* row, int64_t label, T*) const {
        T most = -INFINITE<T>;
        int64_t found = 0;
        for (int64_t k = edges_.into[label]; k < edges_.into[label + 1]; ++k) {
            const T sum = row[edges_.sources[k]] + chains_.transitions[k];
            if (sum > most) most = sum, found = edges_.sources[k];
        }
        return found;
    }

    void clear() { fill_row(total_, chains_.moves, T(0)); }
    void add(const T* left, const T* right, int64_t rows) {
        for (int64_t r = 0; r < rows; ++r, left += width_, right += width_)
            for (int64_t k = 0; k < chains_.moves; ++k) total_[k] += left[edges_.sources[k]] * right[edges_.targets[k]];
    }
    template <class To>
    void settle(To* out) const {
        for (int64_t k = 0; raised_ && k < chains_.moves; ++k) out[k] += To(total_[k]) * power_[k];
    }
    void write(const T* left, const T* right, T* out) const {
        for (int64_t k = 0; k < chains_.moves; ++k) out[k] = left[edges_.sources[k]] * power_[k] * right[edges_.targets[k]];
    }

    int64_t arrivals(int64_t to) const { return edges_.into[to + 1] - edges_.into[to]; }
    int64_t source(int64_t to, int64_t k) const { return edges_.sources[place(to, k)]; }
    int64_t place(int64_t to, int64_t k) const { return edges_.into[to] + k; }
    T power(int64_t to, int64_t k) const { return power_[place(to, k)]; }
    int64_t place_of(int64_t from, int64_t to) const {  // -1 where there is no edge
        int64_t low = edges_.into[to], high = edges_.into[to + 1];
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (edges_.sources[middle] < from) low = middle + 1;
            else high = middle;
        }
        return low < edges_.into[to + 1] && edges_.sources[low] == from ? low : -1;
    }
    double score(int64_t, int64_t, int64_t place) const {
        return place < 0 ? -INFINITE<double> : double(chains_.transitions[place]);
    }

  private:
    const Chains<T>& chains_;
    const Edges& edges_;
    int64_t size_, width_;
    T *power_, *total_;
    bool raised_ = false;
    double top_ = 0;
};

}  // namespace
}  // namespace thalweg::THALWEG_LEVEL
