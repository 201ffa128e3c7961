// `thalweg._kernels`: what Python sees.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "arrays.h"
#include "levels.h"
#include "threads.h"

namespace nb = nanobind;

namespace thalweg {  // every family of kernels adds its own
void add_elementary(nb::module_& m);
void add_chain(nb::module_& m);
void add_memory(nb::module_& m);
void add_sparse_maps(nb::module_& m);
void add_layers(nb::module_& m);
void add_search(nb::module_& m);
void add_transformer(nb::module_& m);
void add_recurrent(nb::module_& m);
void add_monotonic(nb::module_& m);
void add_segments(nb::module_& m);
void add_lattice(nb::module_& m);
}  // namespace thalweg
using namespace thalweg;

static const char* const NAMES[] = {"baseline", "avx2", "avx512"};

NB_MODULE(_kernels, m) {
    m.doc() = "The compiled CPU kernels; thalweg.kernels.cpu is their face.";
    nb::set_leak_warnings(false);  // a model that is still held when the interpreter ends is no leak
    nb::register_exception_translator(
        [](const std::exception_ptr& thrown, void*) {
            try {
                std::rethrow_exception(thrown);
            } catch (const ShapeError& error) {
                nb::object kind = nb::module_::import_("thalweg.errors").attr("ShapeError");
                PyErr_SetString(kind.ptr(), error.what());
            }
        },
        nullptr);
    m.def("best_level", [] { return NAMES[int(best_level())]; });
    m.def("level", [] { return NAMES[int(level())]; });
    m.def("set_level", [](const std::string& name) {
        for (Level level : {Level::baseline, Level::avx2, Level::avx512})
            if (name == NAMES[int(level)]) return set_level(level);
        throw nb::value_error("levels are baseline, avx2 and avx512");
    });
    m.def("set_least_operations", &set_least_operations, nb::arg("operations"));
    add_elementary(m);
    add_chain(m);
    add_memory(m);
    add_sparse_maps(m);
    add_layers(m);
    add_search(m);
    add_transformer(m);
    add_recurrent(m);
    add_monotonic(m);
    add_segments(m);
    add_lattice(m);
}
