// Embedding, norms and sums, a token (or a run of numbers) per item.
#include "basic.hpp"

#include "dot.hpp"
#include "lanes/lanes.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace waste {

namespace {

// Columns an item takes: one token alone keeps four threads busy at a width of 4096.
constexpr std::size_t RUN = 1024;

// body(token, first column, columns) for all columns of all tokens, in parallel.
template <class Body>
void over_columns(Pool &pool, std::size_t tokens, std::size_t dim, std::size_t work, const Body &body) {
  const std::size_t runs = ceil_div(dim, RUN);
  Stage stage(pool);
  stage.parallel(tokens * runs, work, [&](std::size_t item, std::size_t) {
    const std::size_t begin = item % runs * RUN;
    body(item / runs, begin, std::min(RUN, dim - begin));
  });
}

} // namespace

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
  const VectorLanes &vector = lanes().vector;
  Stage stage(pool);
  stage.parallel(rows, rows * n,
                 [&](std::size_t t, std::size_t) { vector.rms_norm(x + t * n, w, n, eps, out + t * n); });
}

void add(Pool &pool, const float *x, const float *y, float *out, std::size_t n) {
  constexpr std::size_t run = 1 << 13;
  const VectorLanes &vector = lanes().vector;
  Stage stage(pool);
  stage.parallel(ceil_div(n, run), n, [&](std::size_t item, std::size_t) {
    const std::size_t begin = item * run;
    vector.add(x + begin, y + begin, std::min(run, n - begin), out + begin);
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
  const StreamLanes &sums = lanes().streams;
  over_columns(pool, tokens, dim, tokens * streams * dim, [&](std::size_t t, std::size_t begin, std::size_t count) {
    sums.mean(x + t * streams * dim + begin, dim, streams, count, out + t * dim + begin);
  });
}

} // namespace waste
