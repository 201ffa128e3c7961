#include "elementary.h"
#include "simd.h"

namespace thalweg::THALWEG_LEVEL {
namespace {

template <class T, Vector<T> (*function)(Vector<T>)>
void all(const T* x, int64_t count, T* out) {
    for (int64_t i = 0; i < count; i += LANES<T>)
        store_some(out + i, function(load_some(x + i, count - i, T(1))), count - i);
}
template <class T>
constexpr ElementaryOf<T> TABLE = {all<T, exp<T>>, all<T, log<T>>, softmax<T>};

}  // namespace

extern const Elementary elementary = {TABLE<float>, TABLE<double>};

}  // namespace thalweg::THALWEG_LEVEL
