// MLA before attention: latents, queries, absorption of the key up-projection.
#include "mla.hpp"

#include "linear.hpp"
#include "vector.hpp"

#include <algorithm>
#include <cstring>

namespace waste {

namespace {

// One run of tokens; scratch holds the unabsorbed queries (T, H * (nope + rope)).
void chunk(Stage &stage, const float *x, const MlaProjection &w, const MlaDims &d, float *q, float *rows,
           float *latent, float *raw, Product *heads) {
  const std::size_t t = d.tokens, row = d.row(), part = d.nope + d.rope, wide = d.heads * part;
  const std::size_t q_lora = w.q_a != nullptr ? w.q_a->rows : 0;
  const float *const *tokens = rows_of(stage, x, d.dim, t);
  float **raws = rows_of(stage, raw, wide, t);
  Product first[2] = {product(*w.kv_a, tokens, rows_of(stage, rows, row, t), t)};
  first[1] = w.q_a != nullptr ? product(*w.q_a, tokens, rows_of(stage, latent, q_lora, t), t)
                              : product(*w.q_b, tokens, raws, t);
  multiply(stage, first);

  stage.parallel(t, t * (row + q_lora), [&](std::size_t i, std::size_t) {
    float *cached = rows + i * row;
    rms_norm(cached, w.kv_a_norm, d.kv_lora, w.latent_eps, cached);
    if (w.inv_freq != nullptr) {
      rotate(cached + d.kv_lora, d.rope, w.start + i, w.inv_freq);
    }
    if (w.q_a != nullptr) {
      rms_norm(latent + i * q_lora, w.q_a_norm, q_lora, w.latent_eps, latent + i * q_lora);
    }
  });
  if (w.q_a != nullptr) {
    const Product second = product(*w.q_b, rows_of<const float>(stage, latent, q_lora, t), raws, t);
    multiply(stage, {&second, 1});
  }

  for (std::size_t h = 0; h < d.heads; ++h) {
    heads[h] = Product{w.k_up,
                       rows_of<const float>(stage, raw + h * part, wide, t),
                       rows_of(stage, q + h * row, d.heads * row, t),
                       t,
                       h * d.kv_lora,
                       (h + 1) * d.kv_lora};
  }
  multiply(stage, {heads, d.heads});
  if (d.rope == 0) {
    return;
  }
  stage.parallel(t, t * d.heads * d.rope, [&](std::size_t i, std::size_t) {
    for (std::size_t h = 0; h < d.heads; ++h) {
      float *to = q + (i * d.heads + h) * row + d.kv_lora;
      std::memcpy(to, raw + i * wide + h * part + d.nope, d.rope * sizeof(float));
      if (w.inv_freq != nullptr) {
        rotate(to, d.rope, w.start + i, w.inv_freq);
      }
    }
  });
}

} // namespace

void mla_project(Pool &pool, const float *x, const MlaProjection &w, const MlaDims &dims, float *q, float *rows,
                 float *latent) {
  Stage stage(pool);
  float *raw = stage.floats(std::min(dims.tokens, TOKENS) * dims.heads * (dims.nope + dims.rope));
  Product *heads = stage.array<Product>(dims.heads);
  const std::size_t q_lora = w.q_a != nullptr ? w.q_a->rows : 0;
  for (std::size_t t = 0; t < dims.tokens; t += TOKENS) {
    MlaDims part = dims;
    part.tokens = std::min(TOKENS, dims.tokens - t);
    MlaProjection at = w;
    at.start = w.start + t;
    chunk(stage, x + t * dims.dim, at, part, q + t * dims.heads * dims.row(), rows + t * dims.row(),
          latent + t * q_lora, raw, heads);
  }
}

} // namespace waste
