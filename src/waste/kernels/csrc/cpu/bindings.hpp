// What the files that make up waste.kernels._cpu share: addresses, and the objects in which a layer's weights come.
#pragma once

#include "border.hpp"
#include "feed_forward.hpp"
#include "hyper.hpp"
#include "index.hpp"
#include "kda.hpp"
#include "mla.hpp"
#include "weight.hpp"

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>

namespace waste {

using Address = std::uintptr_t;

template <class T = float> T *at(Address address) { return reinterpret_cast<T *>(address); }

inline const std::uint8_t *bytes_at(Address address) { return at<const std::uint8_t>(address); }

Format format_of(int code); // throws std::invalid_argument for one without kernels

// A layer's weights and dimensions. Weights are copied: addresses and sizes, in one run of memory, where as arguments
// they were an object and a number each (a KDA layer: 21), all of them cold when a token comes to the layer again.

struct HcSite {
  HcParams params;
  std::size_t streams, dim;
};

struct KdaLayer {
  Weight q, k, v, f_a, f_b, b, g_a, g_b, o;
  KdaWeights vectors; // its matrices are null
  KdaDims dims;       // without tokens
};

struct MlaLayer {
  std::optional<Weight> q_a;
  Weight q_b, kv_a, k_up, v_up, o;
  const float *q_a_norm, *kv_a_norm, *inv_freq;
  double latent_eps, scale;
  MlaDims dims; // without tokens
};

struct Indexer {
  Weight wq_b, wk, proj;
  std::optional<Weight> gate;
  IndexWeights vectors; // its matrices are null
  IndexDims dims;       // without tokens
};

struct Router {
  Weight gate;
  const float *bias;
  std::size_t top_k, groups, topk_groups;
  double scaling;
  bool normalize;
};

// Where the three matrices of an expert lie in its record, and how its inputs are clamped.
struct RecordLayout {
  Format gate, up, down;
  std::size_t gate_offset, up_offset, down_offset;
  std::size_t hidden, inner, nbytes;
  float limit;

  Mlp at(Address record) const {
    const std::uint8_t *base = bytes_at(record);
    return Mlp{Weight{base + gate_offset, gate, inner, hidden}, Weight{base + up_offset, up, inner, hidden},
               Weight{base + down_offset, down, hidden, inner}};
  }
};

void bind_layers(nanobind::module_ &m); // those objects
void bind_stages(nanobind::module_ &m); // what takes a pool first

} // namespace waste
