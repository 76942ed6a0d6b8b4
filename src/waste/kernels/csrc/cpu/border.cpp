// The one file that knows numpy's C interface.
#include "border.hpp"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace waste {

namespace {

static_assert(sizeof(npy_intp) == sizeof(std::size_t));

PyArrayObject *array_of(nb::handle object) {
  return PyArray_Check(object.ptr()) ? reinterpret_cast<PyArrayObject *>(object.ptr()) : nullptr;
}

int type_of(const Element &element) {
  switch (element.kind) {
  case 'f':
    return NPY_FLOAT32;
  case 'i':
    return element.bytes == 4 ? NPY_INT32 : NPY_INT64;
  default:
    return NPY_UINT8;
  }
}

[[noreturn]] void refuse(nb::handle object, const Element &element, bool written, const char *name, const char *axes,
                         Sizes expected) {
  std::ostringstream message;
  message << name << ": expected contiguous " << (written ? "writable " : "") << element.name << " (";
  std::istringstream words(axes);
  std::string axis;
  for (std::size_t i = 0; i < expected.size() && words >> axis; ++i) {
    message << (i > 0 ? ", " : "") << axis << '=' << expected[i];
  }
  message << "), found ";
  PyArrayObject *array = array_of(object);
  if (array == nullptr) {
    message << nb::type_name(object.type()).c_str();
  } else {
    const nb::object dtype = object.attr("dtype"), shape = object.attr("shape");
    message << nb::str(nb::handle(dtype)).c_str() << ' ' << nb::str(nb::handle(shape)).c_str();
    message << (PyArray_IS_C_CONTIGUOUS(array) ? "" : ", not contiguous");
    message << (PyArray_ISALIGNED(array) ? "" : ", not aligned");
    message << (PyArray_ISWRITEABLE(array) ? "" : ", read-only");
  }
  throw std::invalid_argument(message.str());
}

} // namespace

void open_border() {
  if (_import_array() < 0) {
    throw nb::python_error();
  }
}

Sizes sizes(nb::handle object) {
  PyArrayObject *array = array_of(object);
  if (array == nullptr) {
    return {};
  }
  return {reinterpret_cast<const std::size_t *>(PyArray_DIMS(array)), static_cast<std::size_t>(PyArray_NDIM(array))};
}

std::size_t size(nb::handle object, std::size_t i) {
  const Sizes all = sizes(object);
  return i < all.size() ? all[i] : 0;
}

void *numbers(nb::handle object, const Element &element, bool written, const char *name, const char *axes,
              Sizes expected) {
  PyArrayObject *array = array_of(object);
  bool fits = array != nullptr && PyArray_DESCR(array)->kind == element.kind &&
              static_cast<std::size_t>(PyArray_ITEMSIZE(array)) == element.bytes &&
              (written ? PyArray_ISCARRAY(array) : PyArray_ISCARRAY_RO(array)) &&
              static_cast<std::size_t>(PyArray_NDIM(array)) == expected.size();
  for (std::size_t i = 0; fits && i < expected.size(); ++i) {
    fits = static_cast<std::size_t>(PyArray_DIMS(array)[i]) == expected[i];
  }
  if (!fits) {
    refuse(object, element, written, name, axes, expected);
  }
  return PyArray_DATA(array);
}

nb::object empty(const Element &element, Sizes shape, void **data) {
  PyObject *array = PyArray_SimpleNew(static_cast<int>(shape.size()),
                                      reinterpret_cast<const npy_intp *>(shape.data()), type_of(element));
  if (array == nullptr) {
    throw nb::python_error();
  }
  *data = PyArray_DATA(reinterpret_cast<PyArrayObject *>(array));
  return nb::steal(array);
}

} // namespace waste
