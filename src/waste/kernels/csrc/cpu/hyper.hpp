// Manifold-constrained hyper-connections: collapsing S residual streams into one, and writing back.
#pragma once

#include "lanes/lanes.hpp"
#include "pool.hpp"

namespace waste {

struct HcDims {
  std::size_t tokens;
  std::size_t streams; // S, at most HC_STREAMS
  std::size_t dim;     // D
};

struct HcParams {
  const float *fn;    // (2S + S*S, S*D)
  const float *base;  // (2S + S*S)
  const float *scale; // (3): pre, post, mixing
  int iterations;     // column normalisations; row normalisations are one fewer
  double eps;
  double stream_eps; // of the RMS over all streams
  const float *norm; // (D): the sublayer's own norm
  double norm_eps;
};

// streams (T, S, D) -> y (T, D) normed, post (T, S), comb (T, S, S).
void hc_pre(Pool &pool, const float *streams, const HcParams &params, const HcDims &dims, float *y, float *post,
            float *comb);

// In place: streams[t, i] = post[t, i] * out[t] + sum over k, in order, of comb[t, k, i] * streams[t, k].
void hc_post(Pool &pool, float *streams, const float *out, const float *post, const float *comb, const HcDims &dims);

} // namespace waste
