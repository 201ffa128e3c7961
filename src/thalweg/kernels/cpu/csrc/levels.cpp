#include "levels.h"

#include <atomic>
#include <cstdint>
#include <initializer_list>
#ifdef THALWEG_X86
#include <cpuid.h>
#endif

namespace thalweg {

#ifdef THALWEG_X86
namespace {

// What the system saves when it changes threads: a processor's wide registers are of no use where it does not.
uint32_t saved_registers() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

bool all_of(uint32_t word, std::initializer_list<int> bits) {
    for (int bit : bits)
        if (!(word >> bit & 1)) return false;
    return true;
}

}  // namespace

Level best_level() {  // __builtin_cpu_supports would do, but Zig does not link what it needs
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !all_of(c, {12, 22, 27, 28, 29})) return Level::baseline;  // FMA .. F16C
    const uint32_t saved = saved_registers();
    if (!all_of(saved, {1, 2}) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return Level::baseline;
    if (!all_of(b, {3, 5, 8})) return Level::baseline;  // BMI, AVX2, BMI2
    const bool wide = all_of(b, {16, 17, 28, 30, 31}) && all_of(saved, {5, 6, 7});  // AVX-512 F, DQ, CD, BW, VL
    return wide ? Level::avx512 : Level::avx2;
}
#else
Level best_level() { return Level::baseline; }
#endif

static std::atomic<Level> used{best_level()};

Level level() { return used.load(std::memory_order_relaxed); }

void set_level(Level wanted) { used.store(wanted <= best_level() ? wanted : best_level()); }

}  // namespace thalweg
