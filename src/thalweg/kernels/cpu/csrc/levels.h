// Which instructions this processor has, and the kernels that were compiled for them.
#pragma once

namespace thalweg {

enum class Level { baseline, avx2, avx512 };

Level best_level();   // that this processor can run and this build contains
Level level();        // that is used now: the best, unless a test asked for a lower one
void set_level(Level wanted);

}  // namespace thalweg

// THALWEG_KERNELS(Table, name): every level defines `const Table name` in a namespace of its own; `name()` is the one
// to call. On processors without levels there is the baseline alone.
#ifdef THALWEG_X86
#define THALWEG_KERNELS(Table, name)                                     \
    namespace baseline { extern const Table name; }                      \
    namespace avx2 { extern const Table name; }                          \
    namespace avx512 { extern const Table name; }                        \
    inline const Table& name() {                                         \
        switch (level()) {                                               \
            case Level::avx512: return avx512::name;                     \
            case Level::avx2: return avx2::name;                         \
            default: return baseline::name;                              \
        }                                                                \
    }
#else
#define THALWEG_KERNELS(Table, name)                                     \
    namespace baseline { extern const Table name; }                      \
    inline const Table& name() { return baseline::name; }
#endif
