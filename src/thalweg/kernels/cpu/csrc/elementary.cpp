#include "elementary.h"

#include "arrays.h"
#include "threads.h"

namespace thalweg {
namespace nb = nanobind;
namespace {

template <class T>
void add_of(nb::module_& m) {
    const auto free = nb::call_guard<nb::gil_scoped_release>();
    auto add = [&](const char* name, auto member) {
        m.def(name, [member](Array<const T, 1> x, Array<T, 1> out) {
            expect("out", out, x.shape);
            return (elementary().*member)(x.data, x.shape[0], out.data);
        }, free);
    };
    add("exp", &ElementaryOf<T>::exp);
    add("log", &ElementaryOf<T>::log);
    add("softmax", &ElementaryOf<T>::softmax);
}

// Calls itself `parts` times by the threads; the part numbered `bad` throws. For tests of the threads alone.
int64_t share_test(Array<int64_t, 1> out, int threads, int64_t bad) {
    share(out.shape[0], threads, [&](int64_t k) {
        if (k == bad) throw ShapeError(said("part ", k, " failed"));
        int64_t sum = 0;
        for (int64_t i = 0; i < 10000; ++i) sum += i % (k + 2);
        out.data[k] = sum;
    });
    return out.shape[0];
}

}  // namespace

void add_elementary(nb::module_& m) {
    add_of<float>(m);
    add_of<double>(m);
    m.def("share_test", &share_test, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace thalweg
