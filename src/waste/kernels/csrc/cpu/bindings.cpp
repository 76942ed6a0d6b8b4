// The Python face of the stages: waste.kernels._cpu. Arrays come in as addresses; waste.backends.cpu has checked
// their shapes. Every stage releases the GIL.
#include "basic.hpp"
#include "dot.hpp"
#include "encode.hpp"
#include "feed_forward.hpp"
#include "hyper.hpp"
#include "index.hpp"
#include "isa.hpp"
#include "kda.hpp"
#include "lanes/lanes.hpp"
#include "linear.hpp"
#include "mla.hpp"
#include "probe.hpp"
#include "route.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Address = std::uintptr_t;

template <class T = float> T *at(Address address) { return reinterpret_cast<T *>(address); }

const std::uint8_t *bytes_at(Address address) { return at<const std::uint8_t>(address); }

waste::Format format_of(int code) {
  if (code < 0 || code >= waste::FORMATS) {
    throw std::invalid_argument("number format " + std::to_string(code) + " has no kernel");
  }
  return static_cast<waste::Format>(code);
}

// Address of a C-contiguous array of the given element type and shape, or 0 when it is not one. Replaces
// array.ctypes.data (1 to 3 us a call) and the separate checks of dtype, order and shape.
using Shape = nb::typed<nb::tuple, std::size_t, nb::ellipsis>;

template <char... Kinds> Address address_of(nb::handle array, const Shape &shape, bool writable) {
  Py_buffer view;
  const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(array.ptr(), &view, flags) != 0) {
    PyErr_Clear();
    return 0;
  }
  const std::size_t dims = static_cast<std::size_t>(PyTuple_GET_SIZE(shape.ptr()));
  const char *format = view.format != nullptr ? view.format : "B";
  bool fits = ((format[0] == Kinds) || ...) && format[1] == 0 && static_cast<std::size_t>(view.ndim) == dims;
  for (std::size_t i = 0; fits && i < dims; ++i) {
    const Py_ssize_t expected = PyNumber_AsSsize_t(PyTuple_GET_ITEM(shape.ptr(), static_cast<Py_ssize_t>(i)), nullptr);
    if (expected == -1 && PyErr_Occurred()) {
      PyErr_Clear();
      fits = false;
    }
    fits = fits && view.shape[i] == expected;
  }
  const Address address = fits ? reinterpret_cast<Address>(view.buf) : 0;
  PyBuffer_Release(&view);
  return address;
}

// Where the three matrices of an expert lie in its record.
struct RecordLayout {
  waste::Format gate, up, down;
  std::size_t gate_offset, up_offset, down_offset;
  std::size_t hidden, inner;

  waste::Mlp at(Address record) const {
    const std::uint8_t *base = bytes_at(record);
    return waste::Mlp{waste::Weight{base + gate_offset, gate, inner, hidden},
                      waste::Weight{base + up_offset, up, inner, hidden},
                      waste::Weight{base + down_offset, down, hidden, inner}};
  }
};

constexpr auto released = nb::call_guard<nb::gil_scoped_release>();

void bind_memory(nb::module_ &m) {
  m.def("address_f32", &address_of<'f'>, "array"_a, "shape"_a, "writable"_a = false,
        "Address of a C-contiguous float32 array of this shape; 0 if it is anything else.");
  m.def("address_i32", &address_of<'i'>, "array"_a, "shape"_a, "writable"_a = false, "The same for int32.");
  m.def("address_i64", &address_of<'l', 'q'>, "array"_a, "shape"_a, "writable"_a = false, "The same for int64.");
  m.def("address_u8", &address_of<'B'>, "array"_a, "shape"_a, "writable"_a = false, "The same for uint8.");

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

  nb::class_<waste::Weight>(m, "Weight", "A matrix in kernel layout at an address; keeps `owner` alive.")
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

  nb::class_<RecordLayout>(m, "RecordLayout", "Formats and offsets of the three matrices of an expert record.")
      .def(
          "__init__",
          [](RecordLayout *self, std::pair<int, std::size_t> gate, std::pair<int, std::size_t> up,
             std::pair<int, std::size_t> down, std::size_t hidden, std::size_t inner) {
            new (self) RecordLayout{format_of(gate.first), format_of(up.first), format_of(down.first),
                                    gate.second,           up.second,           down.second,
                                    hidden,                inner};
          },
          "gate"_a, "up"_a, "down"_a, "hidden"_a, "inner"_a);
}

void bind_basic(nb::module_ &m) {
  m.def(
      "linear",
      [](waste::Pool &pool, Address x, const waste::Weight &w, Address y, std::size_t tokens) {
        waste::linear(pool, at(x), w, at(y), tokens);
      },
      "pool"_a, "x"_a, "w"_a, "y"_a, "tokens"_a, released);
  m.def(
      "embed",
      [](waste::Pool &pool, const waste::Weight &table, Address ids, Address out, std::size_t tokens) {
        waste::embed(pool, table, at<const std::int64_t>(ids), at(out), tokens);
      },
      "pool"_a, "table"_a, "ids"_a, "out"_a, "tokens"_a, released);
  m.def(
      "rms_norm",
      [](waste::Pool &pool, Address x, Address w, Address out, std::size_t rows, std::size_t n, double eps) {
        waste::rms_norm_rows(pool, at(x), at(w), at(out), rows, n, eps);
      },
      "pool"_a, "x"_a, "w"_a, "out"_a, "rows"_a, "n"_a, "eps"_a, released);
  m.def(
      "add",
      [](waste::Pool &pool, Address x, Address y, Address out, std::size_t n) {
        waste::add(pool, at(x), at(y), at(out), n);
      },
      "pool"_a, "x"_a, "y"_a, "out"_a, "n"_a, released);
  m.def(
      "combine",
      [](waste::Pool &pool, Address parts, Address weights, Address shared, Address out, std::size_t tokens,
         std::size_t top_k,
         std::size_t dim) {
        waste::combine(pool, at(parts), {nullptr, at(weights), tokens, top_k}, at(shared), at(out), dim);
      },
      "pool"_a, "parts"_a, "weights"_a, "shared"_a, "out"_a, "tokens"_a, "top_k"_a, "dim"_a, released,
      "`shared` 0: no shared expert.");
}

void bind_streams(nb::module_ &m) {
  m.def(
      "hc_expand",
      [](waste::Pool &pool, Address x, Address out, std::size_t tokens, std::size_t streams, std::size_t dim) {
        waste::hc_expand(pool, at(x), at(out), tokens, streams, dim);
      },
      "pool"_a, "x"_a, "out"_a, "tokens"_a, "streams"_a, "dim"_a, released);
  m.def(
      "hc_mean",
      [](waste::Pool &pool, Address x, Address out, std::size_t tokens, std::size_t streams, std::size_t dim) {
        waste::hc_mean(pool, at(x), at(out), tokens, streams, dim);
      },
      "pool"_a, "x"_a, "out"_a, "tokens"_a, "streams"_a, "dim"_a, released);
  m.def(
      "hc_pre",
      [](waste::Pool &pool, Address streams, std::size_t tokens, Address y, Address post, Address comb, Address fn,
         Address base, Address scale, Address norm, int iterations, double eps, double stream_eps, double norm_eps,
         std::size_t count, std::size_t dim) {
        const waste::HcParams params{at(fn),     at(base), at(scale), iterations, eps,
                                     stream_eps, at(norm), norm_eps};
        waste::hc_pre(pool, at(streams), params, {tokens, count, dim}, at(y), at(post), at(comb));
      },
      "pool"_a, "streams"_a, "tokens"_a, "y"_a, "post"_a, "comb"_a, "fn"_a, "base"_a, "scale"_a, "norm"_a,
      "iterations"_a, "eps"_a, "stream_eps"_a, "norm_eps"_a, "count"_a, "dim"_a, released);
  m.def(
      "hc_post",
      [](waste::Pool &pool, Address streams, Address out, Address post, Address comb, std::size_t tokens,
         std::size_t count, std::size_t dim) {
        waste::hc_post(pool, at(streams), at(out), at(post), at(comb), {tokens, count, dim});
      },
      "pool"_a, "streams"_a, "out"_a, "post"_a, "comb"_a, "tokens"_a, "count"_a, "dim"_a, released,
      "In place on `streams`.");
  m.attr("HC_STREAMS") = waste::HC_STREAMS;
}

void bind_attention(nb::module_ &m) {
  m.def(
      "kda",
      [](waste::Pool &pool, Address x, std::size_t tokens, Address conv, Address s, Address out,
         const waste::Weight &q, const waste::Weight &k, const waste::Weight &v, const waste::Weight &f_a,
         const waste::Weight &f_b, const waste::Weight &b, const waste::Weight &g_a, const waste::Weight &g_b,
         const waste::Weight &o, Address q_conv, Address k_conv, Address v_conv, Address a_log, Address dt_bias,
         Address norm, std::optional<double> bound, double norm_eps, std::size_t dim, std::size_t heads,
         std::size_t head_dim, std::size_t taps) {
        const waste::KdaWeights w{&q,  &k,         &v,         &f_a,       &f_b,      &b,          &g_a,    &g_b,
                                  &o,  at(q_conv), at(k_conv), at(v_conv), at(a_log), at(dt_bias), at(norm)};
        const waste::KdaDims dims{tokens,   dim,  heads,           head_dim,
                                  taps,     bound.has_value(), bound.value_or(0.0), norm_eps};
        waste::kda(pool, at(x), w, dims, {at(conv), at(s)}, at(out));
      },
      "pool"_a, "x"_a, "tokens"_a, "conv"_a, "s"_a, "out"_a, "q"_a, "k"_a, "v"_a, "f_a"_a, "f_b"_a, "b"_a, "g_a"_a,
      "g_b"_a, "o"_a, "q_conv"_a, "k_conv"_a, "v_conv"_a, "a_log"_a, "dt_bias"_a, "norm"_a, "bound"_a.none(),
      "norm_eps"_a, "dim"_a, "heads"_a, "head_dim"_a, "taps"_a, released);
  m.def(
      "mla_project",
      [](waste::Pool &pool, Address x, std::size_t start, std::size_t tokens, Address q, Address rows, Address latent,
         const waste::Weight *q_a, Address q_a_norm, const waste::Weight &q_b, const waste::Weight &kv_a,
         Address kv_a_norm, const waste::Weight &k_up, double latent_eps, Address inv_freq, std::size_t dim,
         std::size_t heads, std::size_t kv_lora, std::size_t nope, std::size_t rope) {
        const waste::MlaProjection w{q_a,   at(q_a_norm), &q_b,         &kv_a, at(kv_a_norm),
                                     &k_up, latent_eps,   at(inv_freq), start};
        waste::mla_project(pool, at(x), w, {tokens, dim, heads, kv_lora, nope, rope, 0}, at(q), at(rows), at(latent));
      },
      "pool"_a, "x"_a, "start"_a, "tokens"_a, "q"_a, "rows"_a, "latent"_a, "q_a"_a.none(), "q_a_norm"_a, "q_b"_a,
      "kv_a"_a, "kv_a_norm"_a, "k_up"_a, "latent_eps"_a, "inv_freq"_a, "dim"_a, "heads"_a, "kv_lora"_a, "nope"_a,
      "rope"_a, released, "`q_a` None: no query latent. `inv_freq` 0: no rotation.");
  m.def(
      "mla_attend",
      [](waste::Pool &pool, Address q, Address cache, std::size_t start, Address positions, Address offsets,
         std::size_t tokens, Address out, const waste::Weight &v_up, const waste::Weight &o, double scale,
         std::size_t dim, std::size_t heads, std::size_t kv_lora, std::size_t rope, std::size_t v) {
        const waste::MlaAttention w{at(cache), start, at<const std::int32_t>(positions),
                                    at<const std::int64_t>(offsets), &v_up, &o, scale};
        waste::mla_attend(pool, at(q), w, {tokens, dim, heads, kv_lora, 0, rope, v}, at(out));
      },
      "pool"_a, "q"_a, "cache"_a, "start"_a, "positions"_a, "offsets"_a, "tokens"_a, "out"_a, "v_up"_a, "o"_a,
      "scale"_a, "dim"_a, "heads"_a, "kv_lora"_a, "rope"_a, "v"_a, released, "`positions` 0: causal.");
  m.def(
      "index",
      [](waste::Pool &pool, Address x, Address q_latent, std::size_t start, std::size_t tokens, Address keys,
         Address open_keys, Address open_gates, Address positions, Address offsets, const waste::Weight &wq_b,
         const waste::Weight &wk, const waste::Weight &proj, const waste::Weight *gate, Address norm,
         Address norm_bias, Address ape, Address inv_freq, std::size_t rotary, double norm_eps, std::size_t dim,
         std::size_t q_lora, std::size_t heads, std::size_t head_dim, std::size_t pool_size, std::size_t keep) {
        const waste::IndexWeights w{&wq_b, &wk, &proj, gate, at(norm), at(norm_bias), at(ape), at(inv_freq)};
        waste::index(pool, at(x), at(q_latent), w,
                     {tokens, dim, q_lora, heads, head_dim, pool_size, keep, rotary, norm_eps},
                     {at(keys), at(open_keys), at(open_gates), start}, at<std::int32_t>(positions),
                     at<const std::int64_t>(offsets));
      },
      "pool"_a, "x"_a, "q_latent"_a, "start"_a, "tokens"_a, "keys"_a, "open_keys"_a, "open_gates"_a, "positions"_a,
      "offsets"_a, "wq_b"_a, "wk"_a, "proj"_a, "gate"_a.none(), "norm"_a, "norm_bias"_a, "ape"_a, "inv_freq"_a,
      "rotary"_a, "norm_eps"_a, "dim"_a, "q_lora"_a, "heads"_a, "head_dim"_a, "pool_size"_a, "keep"_a, released,
      "`positions` 0: advance only, every query sees its whole past.");
}

using Records = std::vector<std::pair<std::int32_t, Address>>;

std::vector<waste::Expert> experts_of(const RecordLayout &layout, const Records &records) {
  std::vector<waste::Expert> given;
  given.reserve(records.size());
  for (const auto &[id, address] : records) {
    given.push_back({id, layout.at(address)});
  }
  return given;
}

// Parts of the stages above.
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

void bind_feed_forward(nb::module_ &m) {
  m.def(
      "mlp",
      [](waste::Pool &pool, Address x, Address out, std::size_t tokens, float limit, const waste::Weight &gate,
         const waste::Weight &up, const waste::Weight &down) {
        waste::mlp(pool, at(x), {gate, up, down}, limit, at(out), tokens);
      },
      "pool"_a, "x"_a, "out"_a, "tokens"_a, "limit"_a, "gate"_a, "up"_a, "down"_a, released);
  m.def(
      "route",
      [](waste::Pool &pool, Address x, const waste::Weight &gate, Address bias, std::size_t top_k, std::size_t groups,
         std::size_t topk_groups, double scaling, bool normalize, std::size_t tokens, Address ids, Address weights) {
        waste::route(pool, at(x), {&gate, at(bias), top_k, groups, topk_groups, scaling, normalize}, tokens,
                     at<std::int32_t>(ids), at(weights));
      },
      "pool"_a, "x"_a, "gate"_a, "bias"_a, "top_k"_a, "groups"_a, "topk_groups"_a, "scaling"_a, "normalize"_a,
      "tokens"_a, "ids"_a, "weights"_a, released);
  m.def(
      "experts",
      [](waste::Pool &pool, Address x, Address ids, const RecordLayout &layout, const Records &records,
         Address arrived, float limit, Address out, std::size_t tokens, std::size_t top_k) {
        const std::vector<waste::Expert> given = experts_of(layout, records);
        return waste::experts(pool, at(x), {at<const std::int32_t>(ids), nullptr, tokens, top_k},
                              {given.data(), given.size(), at<const std::int32_t>(arrived)}, limit, at(out));
      },
      "pool"_a, "x"_a, "ids"_a, "layout"_a, "records"_a, "arrived"_a, "limit"_a, "out"_a, "tokens"_a, "top_k"_a,
      released, "records: (expert id, address of its record). `arrived` 0: all are there. False: one will not come.");
  m.def(
      "expert_group",
      [](waste::Pool &pool, Address x, Address ids, Address weights, const RecordLayout &layout,
         const Records &records, Address arrived, float limit, Address out, std::size_t tokens, std::size_t top_k,
         const waste::Weight *gate, const waste::Weight *up, const waste::Weight *down) {
        const std::vector<waste::Expert> given = experts_of(layout, records);
        const bool shared = gate != nullptr && up != nullptr && down != nullptr;
        const waste::Mlp common = shared ? waste::Mlp{*gate, *up, *down} : waste::Mlp{};
        return waste::expert_group(pool, at(x), {at<const std::int32_t>(ids), at(weights), tokens, top_k},
                                   {given.data(), given.size(), at<const std::int32_t>(arrived)},
                                   shared ? &common : nullptr, limit, at(out));
      },
      "pool"_a, "x"_a, "ids"_a, "weights"_a, "layout"_a, "records"_a, "arrived"_a, "limit"_a, "out"_a, "tokens"_a,
      "top_k"_a, "gate"_a.none(), "up"_a.none(), "down"_a.none(), released,
      "As `experts`, then the weighted sum and the shared expert's part.");
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
  m.doc() = "Native CPU stages. Addresses are those of C-contiguous arrays; waste.backends.cpu checks shapes.";
  bind_memory(m);
  bind_formats(m);
  bind_basic(m);
  bind_streams(m);
  bind_attention(m);
  bind_parts(m);
  bind_feed_forward(m);
  bind_probe(m);
}
