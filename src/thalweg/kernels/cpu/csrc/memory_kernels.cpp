#include "memory.h"
#include "simd.h"

namespace thalweg::THALWEG_LEVEL {
namespace {

using V = Vector<float>;
constexpr int64_t L = LANES<float>;
constexpr float LOWEST = -std::numeric_limits<float>::max();  // from which -inf is still below
constexpr float OUT_OF_REACH = 1e30f;                         // the top of a lane without a query

// NaN where a number is infinite or none, else 0.
float spoilt(const float* x, int64_t count) {
    V sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * L <= count; i += 4 * L)
        for (int k = 0; k < 4; ++k) sums[k] += load(x + i + k * L) * 0.0f;
    for (; i < count; i += L) sums[0] += load_some(x + i, count - i, 0.0f) * 0.0f;
    return sum_lanes<float>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Scores of `count` patterns from `low` on; few queries wait for memory, so the same rows of the next block are asked for.
void score(const Patterns& patterns, const Panel& panel, int64_t low, int64_t count, int64_t high, Pass& pass) {
    constexpr int64_t ROWS = 8, LINE = 64 / sizeof(float);
    const int64_t inner = patterns.inner;
    for (int64_t n = 0; n < count; n += ROWS) {
        const float* rows = patterns.keys + (low + n) * inner;
        if (low + n + BLOCK + ROWS <= high)
            for (int64_t i = 0; i < ROWS * inner; i += LINE) __builtin_prefetch(rows + BLOCK * inner + i);
        const int64_t some = count - n < ROWS ? count - n : ROWS;
        product(Rows<float>{rows, inner}, panel.state, PANEL, some, inner, pass.width, pass.scores + n * pass.width, pass.width);
    }
}

// Tops after a block of scores, how much what was found before them shrinks, and the level that weights are relative to:
// infinitely high where all scores of a lane count for nothing, whatever the other lanes have. False if so in every lane.
bool raise(const Patterns& patterns, int64_t count, Pass& pass, float* shrink, float* level) {
    Mask<float> near = {};
    for (int64_t lane = 0; lane < pass.width; lane += L) {
        V best = fill(-INFINITE<float>), wrong = {};
        for (int64_t n = 0; n < count; ++n) {
            const V score = load(pass.scores + n * pass.width + lane);
            best = larger<float>(score, best);
            wrong += score * 0.0f;  // NaN from a score that is infinite or none
        }
        const V old = load(pass.top + lane), top = larger<float>(best, old);
        const Mask<float> here = ~((best - old) * patterns.beta + wrong < -patterns.gap);
        near |= here;
        store(pass.top + lane, top);
        store(shrink + lane, exp<float>((old - top) * patterns.beta));
        store(level + lane, select<float>(here, top, fill(INFINITE<float>)));
    }
    return across<int32_t, L>(near, [](auto a, auto b) { return a | b; }) != 0;
}

// Scores become weights.
void weigh(const Patterns& patterns, int64_t count, Pass& pass, const float* shrink, const float* level) {
    for (int64_t lane = 0; lane < pass.width; lane += L) {
        const V top = load(level + lane);
        V sum = {};
        for (int64_t n = 0; n < count; ++n) {
            float* place = pass.scores + n * pass.width + lane;
            const V weight = exp<float>((load(place) - top) * patterns.beta);  // 1 at the top, however large beta is
            store(place, weight);
            sum += weight;
        }
        store(pass.total + lane, load(pass.total + lane) * load(shrink + lane) + sum);
    }
}

// One pass over the patterns low..high - 1.
void sweep(const Patterns& patterns, const Panel& panel, int64_t low, int64_t high, Pass& pass) {
    const int64_t width = (panel.busy + L - 1) / L * L, outer = patterns.outer;
    pass.width = width;
    alignas(64) float shrink[PANEL], level[PANEL];
    for (int64_t lane = 0; lane < width; ++lane) {
        pass.top[lane] = lane < panel.busy ? LOWEST : OUT_OF_REACH;
        pass.total[lane] = 0.0f;
    }
    for (int64_t i = 0; i < outer * width; i += L) store(pass.mixed + i, V{});
    for (; low < high; low += BLOCK) {
        const int64_t count = high - low < BLOCK ? high - low : BLOCK;
        const float* values = patterns.values + low * outer;
        score(patterns, panel, low, count, high, pass);
        bool near = raise(patterns, count, pass, shrink, level);
        // What counts for nothing spoils a mixture all the same; scores of keys that do are not finite.
        if (!near && panel.mixing && patterns.values != patterns.keys) near = !(spoilt(values, count * outer) == 0.0f);
        if (!near) continue;
        weigh(patterns, count, pass, shrink, level);
        if (!panel.mixing) continue;
        product(Rows<float>{values, 1, outer}, pass.scores, width, outer, count, width, pass.fresh, width);
        for (int64_t i = 0; i < outer * width; i += width)
            for (int64_t lane = 0; lane < width; lane += L)
                store(pass.mixed + i + lane, load(pass.mixed + i + lane) * load(shrink + lane) + load(pass.fresh + i + lane));
    }
}

// What was found in other patterns is added.
void join(const Patterns& patterns, const Pass& other, Pass& pass) {
    for (int64_t lane = 0; lane < pass.width; lane += L) {
        const V mine = load(pass.top + lane), theirs = load(other.top + lane), top = larger<float>(mine, theirs);
        const V keep = exp<float>((mine - top) * patterns.beta), add = exp<float>((theirs - top) * patterns.beta);
        store(pass.top + lane, top);
        store(pass.total + lane, load(pass.total + lane) * keep + load(other.total + lane) * add);
        for (int64_t i = lane; i < patterns.outer * pass.width; i += pass.width)
            store(pass.mixed + i, load(pass.mixed + i) * keep + load(other.mixed + i) * add);
    }
}

void move(const Patterns& patterns, const Pass& pass, Panel& panel, Moved& moved) {
    for (int64_t lane = 0; lane < pass.width; lane += L) {
        const V inverse = 1.0f / load(pass.total + lane);
        V way = {}, along = {}, before = {}, after = {};
        for (int64_t i = 0; i < patterns.inner; ++i) {
            float* place = panel.state + i * PANEL + lane;
            const V old = load(place), now = load(pass.mixed + i * pass.width + lane) * inverse, step = now - old;
            store(place, now);
            way += step * step, along += now * step, before += old * old, after += now * now;
        }
        store(moved.way + lane, way), store(moved.along + lane, along);
        store(moved.before + lane, before), store(moved.after + lane, after);
    }
}

float largest_square(const float* rows, int64_t count, int64_t inner) {
    float largest = 0.0f;
    for (int64_t n = 0; n < count; ++n, rows += inner) {
        V sum = {};
        for (int64_t i = 0; i < inner; i += L) {
            const V x = load_some(rows + i, inner - i, 0.0f);
            sum += x * x;
        }
        const float square = sum_lanes<float>(sum);
        largest = square <= largest ? largest : square;
        if (largest != largest) return largest;
    }
    return largest;
}

}  // namespace

extern const Memories memories = {sweep, join, move, largest_square};

}  // namespace thalweg::THALWEG_LEVEL
