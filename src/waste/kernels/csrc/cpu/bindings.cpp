// The Python face of native code: waste.kernels._cpu. Arrays that change from call to call are checked and made by the
// stages (bindings_stages.cpp); what belongs to a layer comes in one object (bindings_layers.cpp), for which
// waste.backends.cpu has checked shapes. Every stage releases the GIL.
#include "bindings.hpp"
#include "dot.hpp"
#include "encode.hpp"
#include "isa.hpp"
#include "lanes/lanes.hpp"
#include "probe.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

waste::Format waste::format_of(int code) {
  if (code < 0 || code >= waste::FORMATS) {
    throw std::invalid_argument("number format " + std::to_string(code) + " has no kernel");
  }
  return static_cast<waste::Format>(code);
}

namespace {

using waste::Address, waste::at, waste::bytes_at, waste::format_of;

constexpr auto released = nb::call_guard<nb::gil_scoped_release>();

template <class T>
Address address_of(waste::Given<T> array, const char *name, const char *axes, const std::vector<std::size_t> &shape,
                   bool writable) {
  return reinterpret_cast<Address>(waste::numbers(array.array, waste::ELEMENT<T>, writable, name, axes, shape));
}

void bind_memory(nb::module_ &m) {
  m.def("address_f32", &address_of<float>, "array"_a, "name"_a, "axes"_a, "shape"_a, "writable"_a = false,
        "Address of a C-contiguous float32 array of this shape; ValueError, naming the axes, if it is anything else.");
  m.def("address_u8", &address_of<std::uint8_t>, "array"_a, "name"_a, "axes"_a, "shape"_a, "writable"_a = false,
        "The same for uint8.");

  nb::class_<waste::Pool>(m, "Pool", "Threads and scratch memory. Stages of one pool run one at a time.")
      .def("__init__",
           [](waste::Pool *self, std::size_t threads) {
             if (threads < 1 || threads > 4096) {
               throw std::invalid_argument("a pool has 1 to 4096 threads, not " + std::to_string(threads));
             }
             new (self) waste::Pool(threads);
           },
           "threads"_a)
      .def_prop_ro("threads", &waste::Pool::threads);

  nb::class_<waste::Weight>(m, "Weight", nb::is_weak_referenceable(),
                            "A matrix in kernel layout at an address; keeps `owner` alive.")
      .def(
          "__init__",
          [](waste::Weight *self, Address address, int fmt, std::size_t rows, std::size_t cols, nb::object) {
            if (address == 0 || rows == 0 || cols == 0) {
              throw std::invalid_argument("a weight has an address, rows and columns");
            }
            new (self) waste::Weight{bytes_at(address), format_of(fmt), rows, cols};
          },
          "address"_a, "fmt"_a, "rows"_a, "cols"_a, "owner"_a.none() = nb::none(), nb::keep_alive<1, 6>())
      .def_prop_ro("rows", [](const waste::Weight &w) { return w.rows; })
      .def_prop_ro("cols", [](const waste::Weight &w) { return w.cols; })
      .def_prop_ro("fmt", [](const waste::Weight &w) { return static_cast<int>(w.format); });
}

void bind_formats(nb::module_ &m) {
  m.def("usable", [](int isa) { return isa >= 0 && isa < waste::ISAS && waste::usable(static_cast<waste::Isa>(isa)); },
        "isa"_a, "Whether native code can use 0 (portable), 1 (avx2), 2 (avx512), 3 (amx) here.");
  m.def("active", [] { return static_cast<int>(waste::active()); }, "The one in use.");
  m.def("lanes", [] { return static_cast<int>(waste::lanes().isa); },
        "The one the float loops in use were compiled for: at most the active one.");
  m.def(
      "force",
      [](std::optional<int> isa) {
        if (isa.has_value() && (*isa < 0 || *isa >= waste::ISAS)) {
          throw std::invalid_argument("there is no instruction set " + std::to_string(*isa));
        }
        waste::force(isa.has_value() ? std::optional(static_cast<waste::Isa>(*isa)) : std::nullopt);
      },
      "isa"_a.none(), "Use this one from now on; None: the best again.");
  m.def(
      "encode",
      [](waste::Pool &pool, Address w, int fmt, std::size_t rows, std::size_t cols, Address importance, int isa,
         Address out) {
        const waste::Format format = format_of(fmt);
        nb::gil_scoped_release unlocked;
        const auto loss = waste::encode(pool, at(w), format, rows, cols, at(importance), static_cast<waste::Isa>(isa),
                                        at<std::uint8_t>(out));
        return std::pair(loss.bad, loss.saturated);
      },
      "pool"_a, "w"_a, "fmt"_a, "rows"_a, "cols"_a, "importance"_a, "isa"_a, "out"_a,
      "`importance` 0: none. Returns the groups with unusable weights and those with a clipped scale.");
  m.def(
      "decode",
      [](waste::Pool &pool, const waste::Weight &w, Address out) {
        waste::Stage stage(pool);
        stage.parallel(waste::ceil_div(w.rows, waste::STRIP), w.rows * w.cols, [&](std::size_t block, std::size_t) {
          waste::decode_block(w, block, at(out) + block * waste::STRIP * w.cols);
        });
      },
      "pool"_a, "w"_a, "out"_a, released, "The whole matrix as floats.");
}

// Parts of the stages, for tests and measurements.
void bind_parts(nb::module_ &m) {
  m.def(
      "delta_rule",
      [](waste::Pool &pool, Address q, Address k, Address v, Address decay, Address beta, std::size_t tokens,
         std::size_t heads, std::size_t head_dim, Address s, Address out) {
        waste::delta_rule(pool, {at(q), at(k), at(v), at(decay), at(beta)},
                          {tokens, 0, heads, head_dim, 0, false, 0.0, 0.0}, at(s), at(out));
      },
      "pool"_a, "q"_a, "k"_a, "v"_a, "decay"_a, "beta"_a, "tokens"_a, "heads"_a, "head_dim"_a, "s"_a, "out"_a,
      released, "The state update of `kda` alone, on (T, heads, head_dim); in place on `s`.");
  m.def(
      "choose",
      [](Address score, std::size_t count, std::size_t keep, Address chosen) {
        if (keep > count) {
          throw std::invalid_argument("cannot choose " + std::to_string(keep) + " of " + std::to_string(count));
        }
        std::vector<std::uint64_t> candidates(count);
        waste::choose(at<const double>(score), count, keep, candidates.data(), at<std::int32_t>(chosen));
      },
      "score"_a, "count"_a, "keep"_a, "chosen"_a, released,
      "Indices of the largest of `count` float64 scores, ascending, ties to the lower: int32 (keep).");
}

void bind_probe(nb::module_ &m) {
  m.def(
      "read_stream",
      [](Address data, std::size_t nbytes, std::size_t passes, std::size_t ahead) {
        if (nbytes % 64 != 0) {
          throw std::invalid_argument("read_stream wants a multiple of 64 bytes, not " + std::to_string(nbytes));
        }
        nb::gil_scoped_release unlocked;
        const waste::Reading found = waste::read_stream(bytes_at(data), nbytes, passes, ahead);
        return std::pair(found.sum, found.seconds);
      },
      "data"_a, "nbytes"_a, "passes"_a, "ahead"_a,
      "Reads everything `passes` times, prefetching `ahead` bytes in front (0: not at all). Returns the sum of its "
      "64-bit words modulo 2^64 and the seconds of CPU time that took this thread.");
}

} // namespace

NB_MODULE(_cpu, m) {
  waste::open_border();
  m.doc() = "Native CPU stages. Arrays are C-contiguous; ValueError, naming the axes, for others.";
  bind_memory(m);
  waste::bind_layers(m);
  bind_formats(m);
  waste::bind_stages(m);
  bind_parts(m);
  bind_probe(m);
}
