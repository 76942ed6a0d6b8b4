// numpy arrays at the border: taken apart, checked and made without going through Python.
//
// Every array a stage works on comes in and goes out this way, some 1200 of them in a token of 45 layers; so numpy's C
// interface it is. Checks that were calls of their own took 0.2 us each, numpy.empty with an address 0.55 us: 0.4 ms a
// token, of 252 calls that now take 0.1 to 0.2 ms with everything but their arithmetic (LEARNED: python-overhead).
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

namespace waste {

using Sizes = std::span<const std::size_t>;

struct Element {
  char kind; // numpy's: f, i, u
  std::size_t bytes;
  const char *name;
};
template <class T> inline constexpr Element ELEMENT{};
template <> inline constexpr Element ELEMENT<float>{'f', 4, "float32"};
template <> inline constexpr Element ELEMENT<std::int32_t>{'i', 4, "int32"};
template <> inline constexpr Element ELEMENT<std::int64_t>{'i', 8, "int64"};
template <> inline constexpr Element ELEMENT<std::uint8_t>{'u', 1, "uint8"};

// An argument that should be an array of T: any object until it has been checked.
template <class T> struct Given {
  nanobind::handle array;
};

// A new array, its numbers still undefined.
template <class T> struct Made {
  nanobind::object array;
  T *data = nullptr;
};

void open_border(); // before anything else here; the GIL is held by whoever calls any of this

Sizes sizes(nanobind::handle array);                     // its axes; none if it is no array
std::size_t size(nanobind::handle array, std::size_t i); // of axis i; 0 if there is none

// The numbers of a C-contiguous, aligned array of this kind and shape. Throws std::invalid_argument with the name, what
// was expected (`axes`: a word for each) and what was found.
void *numbers(nanobind::handle array, const Element &element, bool written, const char *name, const char *axes,
              Sizes expected);
nanobind::object empty(const Element &element, Sizes shape, void **data);

template <class T> const T *read(Given<T> given, const char *name, const char *axes, Sizes expected) {
  return static_cast<const T *>(numbers(given.array, ELEMENT<T>, false, name, axes, expected));
}

template <class T>
const T *read(Given<T> given, const char *name, const char *axes, std::initializer_list<std::size_t> expected) {
  return read(given, name, axes, Sizes(expected.begin(), expected.size()));
}

// The same for an array that is written to.
template <class T>
T *write(Given<T> given, const char *name, const char *axes, std::initializer_list<std::size_t> expected) {
  return static_cast<T *>(
      numbers(given.array, ELEMENT<T>, true, name, axes, Sizes(expected.begin(), expected.size())));
}

template <class T> Made<T> make(Sizes shape) {
  void *data = nullptr;
  nanobind::object array = empty(ELEMENT<T>, shape, &data);
  return {std::move(array), static_cast<T *>(data)};
}

template <class T> Made<T> make(std::initializer_list<std::size_t> shape) {
  return make<T>(Sizes(shape.begin(), shape.size()));
}

} // namespace waste

// How signatures call them.
namespace nanobind::detail {

template <class T> struct array_name {
  static constexpr auto name = const_name("numpy.typing.NDArray[numpy.float32]");
};
template <> struct array_name<std::int32_t> {
  static constexpr auto name = const_name("numpy.typing.NDArray[numpy.int32]");
};
template <> struct array_name<std::int64_t> {
  static constexpr auto name = const_name("numpy.typing.NDArray[numpy.int64]");
};
template <> struct array_name<std::uint8_t> {
  static constexpr auto name = const_name("numpy.typing.NDArray[numpy.uint8]");
};

template <class T> struct type_caster<waste::Given<T>> {
  NB_TYPE_CASTER(waste::Given<T>, array_name<T>::name)

  bool from_python(handle source, std::uint8_t, cleanup_list *) noexcept {
    value.array = source;
    return true;
  }
};

template <class T> struct type_caster<waste::Made<T>> {
  NB_TYPE_CASTER(waste::Made<T>, array_name<T>::name)

  static handle from_cpp(waste::Made<T> &&made, rv_policy, cleanup_list *) noexcept { return made.array.release(); }
};

} // namespace nanobind::detail
