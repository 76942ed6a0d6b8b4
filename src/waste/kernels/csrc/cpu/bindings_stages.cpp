// The stages: what changes from call to call is checked and made here, then the GIL is released.
#include "basic.hpp"
#include "bindings.hpp"
#include "linear.hpp"
#include "route.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using waste::Address, waste::HcSite, waste::Indexer, waste::KdaLayer, waste::MlaLayer, waste::RecordLayout,
    waste::Router;

using Floats = waste::Given<float>;
using NewFloats = waste::Made<float>;

using waste::make, waste::read, waste::size, waste::write;

constexpr const char *AXES[] = {"", "D", "T D", "T S D", "T S S D"}; // where there may be any number of them

const float *any_axes(Floats x, const char *name) {
  const waste::Sizes sizes = waste::sizes(x.array);
  const bool known = !sizes.empty() && sizes.size() < std::size(AXES);
  return known ? read(x, name, AXES[sizes.size()], sizes) : read(x, name, "D", {1}); // which refuses it
}

std::size_t count(waste::Sizes sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::size_t{1}, std::multiplies<>());
}

struct Summands {
  const float *x, *y;
  waste::Sizes sizes;
};

Summands summands(Floats x, Floats y) {
  const float *first = any_axes(x, "x");
  const waste::Sizes sizes = waste::sizes(x.array);
  return {first, read(y, "y", AXES[sizes.size()], sizes), sizes};
}

const waste::Weight *pointer(const std::optional<waste::Weight> &weight) { return weight ? &*weight : nullptr; }

void bind_basic(nb::module_ &m) {
  m.def(
      "linear",
      [](waste::Pool &pool, Floats x, const waste::Weight &w) {
        const std::size_t t = size(x.array, 0);
        const float *in = read(x, "x", "T in", {t, w.cols});
        NewFloats y = make<float>({t, w.rows});
        nb::gil_scoped_release unlocked;
        waste::linear(pool, in, w, y.data, t);
        return y;
      },
      "pool"_a, "x"_a, "w"_a);
  m.def(
      "embed",
      [](waste::Pool &pool, const waste::Weight &table, waste::Given<std::int64_t> ids) {
        const std::size_t t = size(ids.array, 0);
        const std::int64_t *wanted = read(ids, "ids", "T", {t});
        NewFloats out = make<float>({t, table.cols});
        nb::gil_scoped_release unlocked;
        waste::embed(pool, table, wanted, out.data, t);
        return out;
      },
      "pool"_a, "table"_a, "ids"_a);
  m.def(
      "rms_norm",
      [](waste::Pool &pool, Floats x, Floats w, double eps) {
        const float *in = any_axes(x, "x");
        const waste::Sizes sizes = waste::sizes(x.array);
        const std::size_t n = sizes.back(), rows = count(sizes.first(sizes.size() - 1));
        const float *weight = read(w, "weight", "D", {n});
        NewFloats out = make<float>(sizes);
        nb::gil_scoped_release unlocked;
        waste::rms_norm_rows(pool, in, weight, out.data, rows, n, eps);
        return out;
      },
      "pool"_a, "x"_a, "w"_a, "eps"_a);
  m.def(
      "add",
      [](waste::Pool &pool, Floats x, Floats y) {
        const auto [in, more, sizes] = summands(x, y);
        NewFloats out = make<float>(sizes);
        const std::size_t n = count(sizes);
        nb::gil_scoped_release unlocked;
        waste::add(pool, in, more, out.data, n);
        return out;
      },
      "pool"_a, "x"_a, "y"_a);
  m.def(
      "add_norm",
      [](waste::Pool &pool, Floats x, Floats y, Floats w, double eps) {
        const auto [in, more, sizes] = summands(x, y);
        const std::size_t n = sizes.back(), rows = count(sizes.first(sizes.size() - 1));
        const float *weight = read(w, "weight", "D", {n});
        NewFloats sum = make<float>(sizes), out = make<float>(sizes);
        {
          nb::gil_scoped_release unlocked;
          waste::add(pool, in, more, sum.data, rows * n);
          waste::rms_norm_rows(pool, sum.data, weight, out.data, rows, n, eps);
        }
        return std::pair(std::move(sum), std::move(out));
      },
      "pool"_a, "x"_a, "y"_a, "w"_a, "eps"_a, "`add`, then `rms_norm` of the sum: both.");
  m.def(
      "combine",
      [](waste::Pool &pool, Floats parts, Floats weights, std::optional<Floats> shared) {
        const std::size_t t = size(parts.array, 0), k = size(parts.array, 1), d = size(parts.array, 2);
        const float *in = read(parts, "out", "T K D", {t, k, d});
        const float *share = read(weights, "weights", "T K", {t, k});
        const float *common = shared ? read(*shared, "shared", "T D", {t, d}) : nullptr;
        NewFloats out = make<float>({t, d});
        nb::gil_scoped_release unlocked;
        waste::combine(pool, in, {nullptr, share, t, k}, common, out.data, d);
        return out;
      },
      "pool"_a, "parts"_a, "weights"_a, "shared"_a.none());
}

std::size_t tokens_of(Floats streams) { return size(streams.array, 0); }

// What hc_pre makes.
struct Mixed {
  NewFloats y, post, comb;

  Mixed(std::size_t t, const HcSite &site)
      : y(make<float>({t, site.dim})), post(make<float>({t, site.streams})),
        comb(make<float>({t, site.streams, site.streams})) {}

  void fill(waste::Pool &pool, const float *streams, std::size_t t, const HcSite &site) {
    waste::hc_pre(pool, streams, site.params, {t, site.streams, site.dim}, y.data, post.data, comb.data);
  }

  std::tuple<NewFloats, NewFloats, NewFloats> all() && { return {std::move(y), std::move(post), std::move(comb)}; }
};

// What hc_post reads and writes, checked.
struct Spread {
  waste::HcDims dims;
  float *streams;
  const float *out, *post, *comb;

  Spread(Floats x, Floats y, Floats share, Floats mixing, std::size_t t, std::size_t s, std::size_t d)
      : dims{t, s, d}, streams(write(x, "streams", "T S D", {t, s, d})), out(read(y, "out", "T D", {t, d})),
        post(read(share, "post", "T S", {t, s})), comb(read(mixing, "comb", "T S S", {t, s, s})) {}

  void run(waste::Pool &pool) const { waste::hc_post(pool, streams, out, post, comb, dims); }
};

void bind_streams(nb::module_ &m) {
  m.def(
      "hc_expand",
      [](waste::Pool &pool, Floats x, std::size_t streams) {
        const std::size_t t = size(x.array, 0), d = size(x.array, 1);
        const float *in = read(x, "x", "T D", {t, d});
        NewFloats out = make<float>({t, streams, d});
        nb::gil_scoped_release unlocked;
        waste::hc_expand(pool, in, out.data, t, streams, d);
        return out;
      },
      "pool"_a, "x"_a, "streams"_a);
  m.def(
      "hc_mean",
      [](waste::Pool &pool, Floats streams) {
        const std::size_t t = size(streams.array, 0), s = size(streams.array, 1), d = size(streams.array, 2);
        const float *in = read(streams, "streams", "T S D", {t, s, d});
        NewFloats out = make<float>({t, d});
        nb::gil_scoped_release unlocked;
        waste::hc_mean(pool, in, out.data, t, s, d);
        return out;
      },
      "pool"_a, "streams"_a);
  m.def(
      "hc_pre",
      [](waste::Pool &pool, Floats streams, const HcSite &site) {
        const std::size_t t = tokens_of(streams);
        const float *x = read(streams, "streams", "T S D", {t, site.streams, site.dim});
        Mixed mixed(t, site);
        {
          nb::gil_scoped_release unlocked;
          mixed.fill(pool, x, t, site);
        }
        return std::move(mixed).all();
      },
      "pool"_a, "streams"_a, "site"_a, "y, post and comb.");
  m.def(
      "hc_post",
      [](waste::Pool &pool, Floats streams, Floats out, Floats post, Floats comb) {
        const std::size_t s = size(streams.array, 1);
        if (s > waste::HC_STREAMS) {
          throw std::invalid_argument("no room for " + std::to_string(s) + " streams");
        }
        const Spread spread(streams, out, post, comb, tokens_of(streams), s, size(streams.array, 2));
        nb::gil_scoped_release unlocked;
        spread.run(pool);
      },
      "pool"_a, "streams"_a, "out"_a, "post"_a, "comb"_a, "In place on `streams`.");
  m.def(
      "hc_seam",
      [](waste::Pool &pool, Floats streams, Floats out, Floats post, Floats comb, const HcSite &site) {
        const std::size_t t = tokens_of(streams);
        const Spread spread(streams, out, post, comb, t, site.streams, site.dim);
        Mixed mixed(t, site);
        {
          nb::gil_scoped_release unlocked;
          spread.run(pool);
          mixed.fill(pool, spread.streams, t, site);
        }
        return std::move(mixed).all();
      },
      "pool"_a, "streams"_a, "out"_a, "post"_a, "comb"_a, "site"_a, "`hc_post`, in place, then `hc_pre` of `site`.");
  m.attr("HC_STREAMS") = waste::HC_STREAMS;
}

void bind_attention(nb::module_ &m) {
  m.def(
      "kda",
      [](waste::Pool &pool, Floats x, Floats conv, Floats s, const KdaLayer &layer) {
        waste::KdaDims dims = layer.dims;
        const std::size_t t = dims.tokens = size(x.array, 0), c = dims.heads * dims.head_dim;
        waste::KdaWeights w = layer.vectors;
        w.q = &layer.q, w.k = &layer.k, w.v = &layer.v, w.f_a = &layer.f_a, w.f_b = &layer.f_b, w.b = &layer.b;
        w.g_a = &layer.g_a, w.g_b = &layer.g_b, w.o = &layer.o;
        const float *in = read(x, "x", "T D", {t, dims.dim});
        const waste::KdaState state{write(conv, "conv", "qkv taps-1 C", {3, dims.taps - 1, c}),
                                    write(s, "s", "H Dk Dv", {dims.heads, dims.head_dim, dims.head_dim})};
        NewFloats out = make<float>({t, dims.dim});
        nb::gil_scoped_release unlocked;
        waste::kda(pool, in, w, dims, state, out.data);
        return out;
      },
      "pool"_a, "x"_a, "conv"_a, "s"_a, "layer"_a, "In place on `conv` and `s`.");
  m.def(
      "mla_project",
      [](waste::Pool &pool, Floats x, std::size_t start, const MlaLayer &layer) {
        waste::MlaDims dims = layer.dims;
        const std::size_t t = dims.tokens = size(x.array, 0);
        const waste::MlaProjection w{pointer(layer.q_a), layer.q_a_norm, &layer.q_b,       &layer.kv_a,
                                     layer.kv_a_norm,    &layer.k_up,    layer.latent_eps, layer.inv_freq,
                                     start};
        const float *in = read(x, "x", "T D", {t, dims.dim});
        NewFloats q = make<float>({t, dims.heads, dims.row()}), rows = make<float>({t, dims.row()});
        std::optional<NewFloats> latent;
        if (layer.q_a) {
          latent = make<float>({t, layer.q_a->rows});
        }
        {
          nb::gil_scoped_release unlocked;
          waste::mla_project(pool, in, w, dims, q.data, rows.data, latent ? latent->data : nullptr);
        }
        return std::tuple(std::move(q), std::move(rows), std::move(latent));
      },
      "pool"_a, "x"_a, "start"_a, "layer"_a, "q, rows, and the query latent if there is one.");
  m.def(
      "mla_attend",
      [](waste::Pool &pool, Floats q, Floats cache, std::size_t start,
         std::optional<waste::Given<std::int32_t>> positions, std::optional<waste::Given<std::int64_t>> offsets,
         const MlaLayer &layer) {
        waste::MlaDims dims = layer.dims;
        const std::size_t t = dims.tokens = size(q.array, 0), rows = size(cache.array, 0);
        const float *in = read(q, "q", "T H R", {t, dims.heads, dims.row()});
        waste::MlaAttention w{read(cache, "cache", "S R", {rows, dims.row()}), start, nullptr, nullptr, &layer.v_up,
                              &layer.o, layer.scale};
        if (rows < start + t) {
          throw std::invalid_argument("cache: expected at least start+T=" + std::to_string(start + t) +
                                      " rows, found " + std::to_string(rows));
        }
        if (positions && offsets) {
          w.offsets = read(*offsets, "offsets", "T+1", {t + 1});
          w.positions = read(*positions, "positions", "chosen", {static_cast<std::size_t>(w.offsets[t])});
        }
        NewFloats out = make<float>({t, dims.dim});
        nb::gil_scoped_release unlocked;
        waste::mla_attend(pool, in, w, dims, out.data);
        return out;
      },
      "pool"_a, "q"_a, "cache"_a, "start"_a, "positions"_a.none(), "offsets"_a.none(), "layer"_a,
      "`positions` None: causal.");
  m.def(
      "index",
      [](waste::Pool &pool, Floats x, Floats q_latent, std::size_t start, Floats keys, Floats open_keys,
         Floats open_gates, const Indexer &layer) {
        waste::IndexDims dims = layer.dims;
        const std::size_t t = dims.tokens = size(x.array, 0), d = dims.head_dim, pools = (start + t) / dims.pool;
        waste::IndexWeights w = layer.vectors;
        w.wq_b = &layer.wq_b, w.wk = &layer.wk, w.proj = &layer.proj, w.gate = pointer(layer.gate);
        const float *in = read(x, "x", "T D", {t, dims.dim});
        const float *latent = read(q_latent, "q_latent", "T q_lora", {t, dims.q_lora});
        const std::size_t capacity = size(keys.array, 0);
        waste::IndexState state{write(keys, "keys", "capacity d", {capacity, d}), nullptr, nullptr, start};
        if (dims.pool > 1) {
          state.open_keys = write(open_keys, "open_keys", "pool d", {dims.pool, d});
          state.open_gates = write(open_gates, "open_gates", "pool d", {dims.pool, d});
        }
        if (capacity < pools) {
          throw std::invalid_argument("index keys: " + std::to_string(pools) + " pools do not fit the capacity of " +
                                      std::to_string(capacity));
        }
        std::optional<std::pair<waste::Made<std::int32_t>, waste::Made<std::int64_t>>> chosen;
        if (pools > dims.keep) {
          waste::Made<std::int64_t> offsets = make<std::int64_t>({t + 1});
          offsets.data[0] = 0;
          for (std::size_t i = 0; i < t; ++i) {
            const std::size_t seen = start + i + 1;
            const std::size_t n = std::min(seen / dims.pool, dims.keep) * dims.pool + seen % dims.pool;
            offsets.data[i + 1] = offsets.data[i] + static_cast<std::int64_t>(n);
          }
          chosen.emplace(make<std::int32_t>({static_cast<std::size_t>(offsets.data[t])}), std::move(offsets));
        }
        {
          nb::gil_scoped_release unlocked;
          waste::index(pool, in, latent, w, dims, state, chosen ? chosen->first.data : nullptr,
                       chosen ? chosen->second.data : nullptr);
        }
        return chosen;
      },
      "pool"_a, "x"_a, "q_latent"_a, "start"_a, "keys"_a, "open_keys"_a, "open_gates"_a, "layer"_a,
      "Positions and offsets; None while every query sees its whole past. In place on keys, and, in pools of more than "
      "one token, on the open ones.");
}

// waste.backends.base.Record are tuples: (expert, data, address, nbytes, arrived). Read as such, because pairs made of
// them in Python took 3 us a layer.
using Records = nb::typed<nb::sequence, nb::typed<nb::tuple, std::int32_t, nb::object, Address, std::size_t, Address>>;

std::vector<waste::Expert> experts_of(const RecordLayout &layout, const Records &records) {
  const nb::object fast = nb::steal(PySequence_Fast(records.ptr(), "records: expected a sequence"));
  if (!fast.is_valid()) {
    throw nb::python_error();
  }
  std::vector<waste::Expert> given;
  const auto n = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr()));
  given.reserve(n);
  for (std::size_t i = 0; i < n; ++i) {
    PyObject *record = PySequence_Fast_GET_ITEM(fast.ptr(), static_cast<Py_ssize_t>(i));
    if (!PyTuple_Check(record) || PyTuple_GET_SIZE(record) != 5) {
      throw std::invalid_argument("records: expected tuples (expert, data, address, nbytes, arrived)");
    }
    const auto nbytes = nb::cast<std::size_t>(nb::handle(PyTuple_GET_ITEM(record, 3)));
    if (nbytes < layout.nbytes) {
      throw std::invalid_argument("record: expected " + std::to_string(layout.nbytes) + " bytes, found " +
                                  std::to_string(nbytes));
    }
    const auto id = nb::cast<std::int32_t>(nb::handle(PyTuple_GET_ITEM(record, 0)));
    const auto address = nb::cast<Address>(nb::handle(PyTuple_GET_ITEM(record, 2)));
    const auto arrived = nb::cast<Address>(nb::handle(PyTuple_GET_ITEM(record, 4)));
    if (id < 0 || address == 0 || arrived % sizeof(std::int32_t) != 0) {
      throw std::invalid_argument("a record has an expert from 0 up, an address and an aligned flag");
    }
    given.push_back({id, layout.at(address), reinterpret_cast<const std::int32_t *>(arrived)});
  }
  return given;
}

using Ids = waste::Given<std::int32_t>;

// Whether a signal wants this thread; its handler has run then, and may have raised.
bool signalled() {
  nb::gil_scoped_acquire locked;
  return PyErr_CheckSignals() != 0;
}

void raise_if_signalled() {
  if (PyErr_Occurred() != nullptr) {
    throw nb::python_error();
  }
}

void bind_feed_forward(nb::module_ &m) {
  m.def(
      "mlp",
      [](waste::Pool &pool, Floats x, const waste::Mlp &w, float limit) {
        const std::size_t t = size(x.array, 0);
        const float *in = read(x, "x", "T D", {t, w.gate.cols});
        NewFloats out = make<float>({t, w.down.rows});
        nb::gil_scoped_release unlocked;
        waste::mlp(pool, in, w, limit, out.data, t);
        return out;
      },
      "pool"_a, "x"_a, "w"_a, "limit"_a);
  m.def(
      "route",
      [](waste::Pool &pool, Floats x, const Router &router) {
        const std::size_t t = size(x.array, 0), k = router.top_k;
        const float *in = read(x, "x", "T D", {t, router.gate.cols});
        waste::Made<std::int32_t> ids = make<std::int32_t>({t, k});
        NewFloats weights = make<float>({t, k});
        {
          nb::gil_scoped_release unlocked;
          waste::route(pool, in,
                       {&router.gate, router.bias, k, router.groups, router.topk_groups, router.scaling,
                        router.normalize},
                       t, ids.data, weights.data);
        }
        return std::pair(std::move(ids), std::move(weights));
      },
      "pool"_a, "x"_a, "router"_a, "ids and weights.");
  m.def(
      "experts",
      [](waste::Pool &pool, Floats x, Ids ids, const RecordLayout &layout, const Records &records,
         Floats out) {
        const std::size_t t = size(ids.array, 0), k = size(ids.array, 1);
        const std::int32_t *chosen = read(ids, "ids", "T K", {t, k});
        const float *in = read(x, "x", "T D", {t, layout.hidden});
        float *parts = write(out, "out", "T K D", {t, k, layout.hidden});
        const std::vector<waste::Expert> given = experts_of(layout, records);
        waste::Outcome outcome;
        {
          nb::gil_scoped_release unlocked;
          const waste::Experts all{given.data(), given.size(), layout.hidden, signalled};
          outcome = waste::experts(pool, in, {chosen, nullptr, t, k}, all, layout.limit, parts);
        }
        raise_if_signalled();
        return std::pair(outcome.whole, outcome.stalled_s);
      },
      "pool"_a, "x"_a, "ids"_a, "layout"_a, "records"_a, "out"_a,
      "records: (expert, data, address, nbytes, arrived) each; `arrived`: address of an int32 that others set, 0 when "
      "the record is there. Returns whether all have come, and the seconds in which none was there to compute.");
  m.def(
      "expert_group",
      [](waste::Pool &pool, Floats x, Ids ids, Floats weights, const RecordLayout &layout, const Records &records,
         const waste::Mlp *shared) {
        const std::size_t t = size(ids.array, 0), k = size(ids.array, 1), d = layout.hidden;
        const std::int32_t *chosen = read(ids, "ids", "T K", {t, k});
        const float *in = read(x, "x", "T D", {t, d}), *share = read(weights, "weights", "T K", {t, k});
        if (shared != nullptr && (shared->gate.cols != d || shared->down.rows != d)) {
          throw std::invalid_argument("shared: expected D=" + std::to_string(d) + ", found " +
                                      std::to_string(shared->gate.cols) + " to " + std::to_string(shared->down.rows));
        }
        const std::vector<waste::Expert> given = experts_of(layout, records);
        NewFloats out = make<float>({t, d});
        waste::Outcome outcome;
        {
          nb::gil_scoped_release unlocked;
          const waste::Experts all{given.data(), given.size(), layout.hidden, signalled};
          outcome = waste::expert_group(pool, in, {chosen, share, t, k}, all, shared, layout.limit, out.data);
        }
        raise_if_signalled();
        return std::tuple(std::move(out), outcome.whole, outcome.stalled_s);
      },
      "pool"_a, "x"_a, "ids"_a, "weights"_a, "layout"_a, "records"_a, "shared"_a.none(),
      "As `experts`, then the weighted sum and the shared expert's part: that, and what `experts` returns.");
}

} // namespace

void waste::bind_stages(nb::module_ &m) {
  bind_basic(m);
  bind_streams(m);
  bind_attention(m);
  bind_feed_forward(m);
}
