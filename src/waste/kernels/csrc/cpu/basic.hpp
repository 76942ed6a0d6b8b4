// Stages without a matrix product: embedding rows, norms, sums.
#pragma once

#include "pool.hpp"
#include "weight.hpp"

#include <cstdint>

namespace waste {

// out (T, cols): row ids[t] of the table. Throws std::out_of_range for an id outside it.
void embed(Pool &pool, const Weight &table, const std::int64_t *ids, float *out, std::size_t tokens);

// out (rows, n): each row normed. See vector.hpp.
void rms_norm_rows(Pool &pool, const float *x, const float *w, float *out, std::size_t rows, std::size_t n,
                   double eps);

// out = x + y, n numbers each.
void add(Pool &pool, const float *x, const float *y, float *out, std::size_t n);

// out (T, S, D): x (T, D) in every stream.
void hc_expand(Pool &pool, const float *x, float *out, std::size_t tokens, std::size_t streams, std::size_t dim);

// out (T, D): mean of x (T, S, D) over S.
void hc_mean(Pool &pool, const float *x, float *out, std::size_t tokens, std::size_t streams, std::size_t dim);

} // namespace waste
