// Embedding, norms and sums, a token (or a run of numbers) per item.
#include "basic.hpp"

#include "dot.hpp"
#include "vector.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace waste {

void embed(Pool &pool, const Weight &table, const std::int64_t *ids, float *out, std::size_t tokens) {
  for (std::size_t t = 0; t < tokens; ++t) {
    if (ids[t] < 0 || static_cast<std::size_t>(ids[t]) >= table.rows) {
      throw std::out_of_range("token id " + std::to_string(ids[t]) + " in a table of " + std::to_string(table.rows) +
                              " rows");
    }
  }
  Stage stage(pool);
  stage.parallel(tokens, tokens * table.cols, [&](std::size_t t, std::size_t) {
    decode_row(table, static_cast<std::size_t>(ids[t]), out + t * table.cols);
  });
}

void rms_norm_rows(Pool &pool, const float *x, const float *w, float *out, std::size_t rows, std::size_t n,
                   double eps) {
  Stage stage(pool);
  stage.parallel(rows, rows * n,
                 [&](std::size_t t, std::size_t) { rms_norm(x + t * n, w, n, eps, out + t * n); });
}

void add(Pool &pool, const float *x, const float *y, float *out, std::size_t n) {
  constexpr std::size_t run = 1 << 13;
  Stage stage(pool);
  stage.parallel((n + run - 1) / run, n, [&](std::size_t item, std::size_t) {
    const std::size_t end = std::min(n, (item + 1) * run);
    for (std::size_t i = item * run; i < end; ++i) {
      out[i] = x[i] + y[i];
    }
  });
}

void hc_expand(Pool &pool, const float *x, float *out, std::size_t tokens, std::size_t streams, std::size_t dim) {
  Stage stage(pool);
  stage.parallel(tokens, tokens * streams * dim, [&](std::size_t t, std::size_t) {
    for (std::size_t s = 0; s < streams; ++s) {
      std::memcpy(out + (t * streams + s) * dim, x + t * dim, dim * sizeof(float));
    }
  });
}

void hc_mean(Pool &pool, const float *x, float *out, std::size_t tokens, std::size_t streams, std::size_t dim) {
  Stage stage(pool);
  const float share = 1.0f / static_cast<float>(streams);
  stage.parallel(tokens, tokens * streams * dim, [&](std::size_t t, std::size_t) {
    float *mean = out + t * dim;
    std::memcpy(mean, x + t * streams * dim, dim * sizeof(float));
    for (std::size_t s = 1; s < streams; ++s) {
      const float *stream = x + (t * streams + s) * dim;
      for (std::size_t i = 0; i < dim; ++i) {
        mean[i] += stream[i];
      }
    }
    scale(mean, dim, share);
  });
}

} // namespace waste
