// A layer's weights and dimensions in one object, made when a backend meets the layer first.
#include "bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace nb = nanobind;
using namespace nb::literals;

namespace waste {

namespace {

std::optional<Weight> copy(const Weight *weight) {
  return weight != nullptr ? std::optional(*weight) : std::nullopt;
}

} // namespace

// The addresses of vectors stay valid only as long as the arrays live: waste.backends.cpu sees to that.
void bind_layers(nb::module_ &m) {
  nb::class_<HcSite>(m, "HcSite", "A hyper-connection site.")
      .def(
          "__init__",
          [](HcSite *self, Address fn, Address base, Address scale, Address norm, int iterations, double eps,
             double stream_eps, double norm_eps, std::size_t streams, std::size_t dim) {
            if (streams < 1 || streams > HC_STREAMS) {
              throw std::invalid_argument("no room for " + std::to_string(streams) + " streams");
            }
            new (self) HcSite{{at(fn), at(base), at(scale), iterations, eps, stream_eps, at(norm), norm_eps},
                              streams, dim};
          },
          "fn"_a, "base"_a, "scale"_a, "norm"_a, "iterations"_a, "eps"_a, "stream_eps"_a, "norm_eps"_a, "streams"_a,
          "dim"_a);
  nb::class_<KdaLayer>(m, "KdaLayer", "A KDA sublayer. `bound` None: log decay has no lower bound.")
      .def(
          "__init__",
          [](KdaLayer *self, const Weight &q, const Weight &k, const Weight &v,
             const Weight &f_a, const Weight &f_b, const Weight &b, const Weight &g_a,
             const Weight &g_b, const Weight &o, Address q_conv, Address k_conv, Address v_conv,
             Address a_log, Address dt_bias, Address norm, std::optional<double> bound, double norm_eps,
             std::size_t dim, std::size_t heads, std::size_t head_dim, std::size_t taps) {
            KdaWeights vectors{};
            vectors.q_conv = at(q_conv), vectors.k_conv = at(k_conv), vectors.v_conv = at(v_conv);
            vectors.a_log = at(a_log), vectors.dt_bias = at(dt_bias), vectors.norm = at(norm);
            const KdaDims dims{0,    dim, heads, head_dim, taps, bound.has_value(), bound.value_or(0.0),
                                      norm_eps};
            new (self) KdaLayer{q, k, v, f_a, f_b, b, g_a, g_b, o, vectors, dims};
          },
          "q"_a, "k"_a, "v"_a, "f_a"_a, "f_b"_a, "b"_a, "g_a"_a, "g_b"_a, "o"_a, "q_conv"_a, "k_conv"_a, "v_conv"_a,
          "a_log"_a, "dt_bias"_a, "norm"_a, "bound"_a.none(), "norm_eps"_a, "dim"_a, "heads"_a, "head_dim"_a,
          "taps"_a);
  nb::class_<MlaLayer>(m, "MlaLayer", "An MLA sublayer. `q_a` None: no query latent. `inv_freq` 0: no rotation.")
      .def(
          "__init__",
          [](MlaLayer *self, const Weight *q_a, Address q_a_norm, const Weight &q_b,
             const Weight &kv_a, Address kv_a_norm, const Weight &k_up, const Weight &v_up,
             const Weight &o, double latent_eps, double scale, Address inv_freq, std::size_t dim,
             std::size_t heads, std::size_t kv_lora, std::size_t nope, std::size_t rope, std::size_t v) {
            new (self) MlaLayer{copy(q_a),     q_b,           kv_a,         k_up,       v_up,  o,
                                at(q_a_norm),  at(kv_a_norm), at(inv_freq), latent_eps, scale,
                                {0, dim, heads, kv_lora, nope, rope, v}};
          },
          "q_a"_a.none(), "q_a_norm"_a, "q_b"_a, "kv_a"_a, "kv_a_norm"_a, "k_up"_a, "v_up"_a, "o"_a, "latent_eps"_a,
          "scale"_a, "inv_freq"_a, "dim"_a, "heads"_a, "kv_lora"_a, "nope"_a, "rope"_a, "v"_a);
  nb::class_<Indexer>(m, "Indexer", "The index of an MLA sublayer. `gate` None, `ape` 0: every token is a pool.")
      .def(
          "__init__",
          [](Indexer *self, const Weight &wq_b, const Weight &wk, const Weight &proj,
             const Weight *gate, Address norm, Address norm_bias, Address ape, Address inv_freq,
             std::size_t rotary, double norm_eps, std::size_t dim, std::size_t q_lora, std::size_t heads,
             std::size_t head_dim, std::size_t pool, std::size_t keep) {
            if (pool < 1 || (pool > 1 && gate == nullptr)) {
              throw std::invalid_argument("pools of " + std::to_string(pool) + " tokens need a gate");
            }
            IndexWeights vectors{};
            vectors.norm = at(norm), vectors.norm_bias = at(norm_bias);
            vectors.ape = at(ape), vectors.inv_freq = at(inv_freq);
            new (self) Indexer{wq_b, wk, proj, copy(gate), vectors,
                               {0, dim, q_lora, heads, head_dim, pool, keep, rotary, norm_eps}};
          },
          "wq_b"_a, "wk"_a, "proj"_a, "gate"_a.none(), "norm"_a, "norm_bias"_a, "ape"_a, "inv_freq"_a, "rotary"_a,
          "norm_eps"_a, "dim"_a, "q_lora"_a, "heads"_a, "head_dim"_a, "pool"_a, "keep"_a);
  nb::class_<Mlp>(m, "Mlp", "A dense feed-forward: gate and up (F, D), down (D, F).")
      .def(
          "__init__",
          [](Mlp *self, const Weight &gate, const Weight &up, const Weight &down) {
            new (self) Mlp{gate, up, down};
          },
          "gate"_a, "up"_a, "down"_a);
  nb::class_<Router>(m, "Router", "The router of an MoE sublayer.")
      .def(
          "__init__",
          [](Router *self, const Weight &gate, Address bias, std::size_t top_k, std::size_t groups,
             std::size_t topk_groups, double scaling, bool normalize) {
            new (self) Router{gate, at(bias), top_k, groups, topk_groups, scaling, normalize};
          },
          "gate"_a, "bias"_a, "top_k"_a, "groups"_a, "topk_groups"_a, "scaling"_a, "normalize"_a);
  nb::class_<RecordLayout>(m, "RecordLayout",
                           "Formats and offsets of the three matrices of an expert record; it has `nbytes` or more.")
      .def(
          "__init__",
          [](RecordLayout *self, std::pair<int, std::size_t> gate, std::pair<int, std::size_t> up,
             std::pair<int, std::size_t> down, std::size_t hidden, std::size_t inner, std::size_t nbytes,
             float limit) {
            new (self) RecordLayout{format_of(gate.first), format_of(up.first), format_of(down.first),
                                    gate.second,           up.second,           down.second,
                                    hidden,                inner,               nbytes,
                                    limit};
          },
          "gate"_a, "up"_a, "down"_a, "hidden"_a, "inner"_a, "nbytes"_a, "limit"_a);
}

} // namespace waste
