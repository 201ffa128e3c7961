// Arrays of Python as structs with a shape, checked on the way in, and the errors of what does not fit.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace thalweg {

// Becomes `thalweg.errors.ShapeError`.
struct ShapeError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A contiguous array in the memory of the processor, with N axes of numbers of exactly the type T: anything else is a
// TypeError before a function is entered, and nothing is ever converted or copied. `const T` reads.
template <class T, size_t N>
struct Array {
    T* data = nullptr;
    std::array<int64_t, N> shape{};

    int64_t size() const {
        int64_t product = 1;
        for (int64_t length : shape) product *= length;
        return product;
    }
};

// Such an array of float32 that is kept alive after the call too.
template <size_t N>
struct Kept : Array<const float, N> {
    nanobind::ndarray<const float, nanobind::ndim<N>, nanobind::c_contig, nanobind::device::cpu> owner;
};

template <class... Parts>
std::string said(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    return text.str();
}

// `name` must have this shape.
template <class T, size_t N>
void expect(std::string_view name, const Array<T, N>& given, const std::array<int64_t, N>& shape) {
    if (given.shape == shape) return;
    std::ostringstream text;
    auto list = [&](const auto& lengths) {
        text << "(";
        for (size_t k = 0; k < N; ++k) text << lengths[k] << (k + 1 < N ? ", " : N == 1 ? ",)" : ")");
    };
    text << "`" << name << "` must be ";
    list(shape);
    text << ", got ";
    list(given.shape);
    throw ShapeError(text.str());
}

// Every index of `name` must lie in low..high - 1.
template <class T, size_t N>
void expect_range(std::string_view name, const Array<T, N>& given, int64_t low, int64_t high) {
    for (int64_t k = 0, count = given.size(); k < count; ++k) {
        if (given.data[k] < low || given.data[k] >= high) {
            throw ShapeError(said("`", name, "` must lie in ", low, "..", high - 1, ", got ", given.data[k], " at place ", k));
        }
    }
}

}  // namespace thalweg

namespace nanobind::detail {

template <class Given, class T, size_t N>
struct array_caster {
    using Inner = make_caster<ndarray<T, ndim<N>, c_contig, device::cpu>>;
    using Value = Given;
    static constexpr auto Name = Inner::Name;
    template <class U>
    using Cast = Value&;
    template <class U>
    static constexpr bool can_cast() {
        return true;
    }

    bool from_python(handle src, uint32_t flags, cleanup_list* cleanup) noexcept {
        // Inside a tuple None would be taken for an array without memory.
        if (src.is_none() || !inner.from_python(src, flags & ~uint32_t(cast_flags::convert), cleanup)) return false;
        value.data = inner.value.data();
        for (size_t k = 0; k < N; ++k) value.shape[k] = int64_t(inner.value.shape(k));
        if constexpr (requires { value.owner; }) value.owner = inner.value;
        return true;
    }

    explicit operator Value&() { return value; }

    Inner inner;  // keeps the array alive as long as the call
    Value value;
};
template <class T, size_t N>
struct type_caster<thalweg::Array<T, N>> : array_caster<thalweg::Array<T, N>, T, N> {};
template <size_t N>
struct type_caster<thalweg::Kept<N>> : array_caster<thalweg::Kept<N>, const float, N> {};

}  // namespace nanobind::detail
