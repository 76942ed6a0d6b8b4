// Matrix products: inputs rotated once for all rows, then items of runs of 16-row blocks times runs of tokens.
#include "linear.hpp"

#include <algorithm>

namespace waste {

namespace {

// Multiply-adds of an item: large against the claim of an item, small against the whole.
constexpr std::size_t ITEM = 1 << 16;

struct Cut {
  std::size_t first;  // item number
  std::size_t blocks; // of 16 rows per item
  std::size_t runs;   // items along the rows
};

std::size_t blocks_per_item(std::size_t cols, std::size_t tokens) {
  return std::max<std::size_t>(1, ITEM / (STRIP * cols * std::clamp<std::size_t>(tokens, 1, TOKENS)));
}

// The products with inputs as dot_block takes them: for rotated formats rotated, once for neighbours that share them.
std::span<const Product> rotate_inputs(Stage &stage, std::span<const Product> given) {
  struct Input {
    const float *x;
    std::size_t cols;
  };
  std::size_t most = 0, numbers = 0; // without sharing
  for (const Product &p : given) {
    if (rotated(p.w->format)) {
      most += p.tokens;
      numbers += p.tokens * p.w->groups() * GROUP;
    }
  }
  if (most == 0) {
    return given;
  }
  Product *products = stage.array<Product>(given.size());
  Input *in = stage.array<Input>(most);
  float **out = stage.array<float *>(most), *free = stage.passing_floats(numbers);
  std::size_t count = 0, work = 0, last = given.size();
  for (std::size_t i = 0; i < given.size(); ++i) {
    const Product &p = given[i];
    products[i] = p;
    if (!rotated(p.w->format)) {
      continue;
    }
    if (last < i && given[last].x == p.x && given[last].tokens == p.tokens && given[last].w->cols == p.w->cols) {
      products[i].x = products[last].x;
      continue;
    }
    last = i;
    products[i].x = out + count;
    for (std::size_t t = 0; t < p.tokens; ++t) {
      in[count] = Input{p.x[t], p.w->cols};
      out[count++] = free;
      free += p.w->groups() * GROUP;
      work += 8 * p.w->cols; // signs and 7 additions each
    }
  }
  stage.parallel(count, work, [&](std::size_t i, std::size_t) { rotate_input(in[i].x, in[i].cols, out[i]); });
  return {products, given.size()};
}

} // namespace

void multiply(Stage &stage, std::span<const Product> given) {
  const std::span<const Product> products = rotate_inputs(stage, given);
  Cut *cuts = stage.array<Cut>(products.size());
  std::size_t items = 0, work = 0;
  for (std::size_t i = 0; i < products.size(); ++i) {
    const Product &p = products[i];
    if (p.tokens == 0 || p.begin == p.end) {
      cuts[i] = Cut{items, 1, 1};
      continue;
    }
    const std::size_t blocks = ceil_div(p.end, STRIP) - p.begin / STRIP;
    const std::size_t per = blocks_per_item(p.w->cols, p.tokens);
    cuts[i] = Cut{items, per, ceil_div(blocks, per)};
    items += cuts[i].runs * ceil_div(p.tokens, TOKENS);
    work += (p.end - p.begin) * p.w->cols * p.tokens;
  }
  stage.parallel(items, work, [&](std::size_t item, std::size_t) {
    // The last product that starts at or before this item; empty ones share their start with the next.
    const Cut *cut = std::upper_bound(cuts, cuts + products.size(), item,
                                      [](std::size_t value, const Cut &c) { return value < c.first; }) -
                     1;
    const Product &p = products[static_cast<std::size_t>(cut - cuts)];
    const std::size_t local = item - cut->first;
    const std::size_t token = local / cut->runs * TOKENS, count = std::min(TOKENS, p.tokens - token);
    const std::size_t block = p.begin / STRIP + local % cut->runs * cut->blocks;
    const std::size_t last = std::min(block + cut->blocks, ceil_div(p.end, STRIP));
    for (std::size_t b = block; b < last; ++b) {
      dot_block(*p.w, b, std::max(b * STRIP, p.begin), std::min((b + 1) * STRIP, p.end), p.x + token, count,
                p.y + token, p.begin);
    }
  });
}

void multiply_f64(Stage &stage, const Weight &w, const float *const *x, double *const *y, std::size_t tokens) {
  const std::size_t blocks = ceil_div(w.rows, STRIP), per = blocks_per_item(w.cols, tokens);
  const std::size_t runs = ceil_div(blocks, per);
  stage.parallel(runs * ceil_div(tokens, TOKENS), w.rows * w.cols * tokens, [&](std::size_t item, std::size_t) {
    const std::size_t token = item / runs * TOKENS, count = std::min(TOKENS, tokens - token);
    const std::size_t block = item % runs * per, last = std::min(block + per, blocks);
    for (std::size_t b = block; b < last; ++b) {
      dot_block_f64(w, b, b * STRIP, std::min((b + 1) * STRIP, w.rows), x + token, count, y + token, 0);
    }
  });
}

void linear(Pool &pool, const float *x, const Weight &w, float *y, std::size_t tokens) {
  Stage stage(pool);
  const Product p = product(w, rows_of(stage, x, w.cols, tokens), rows_of(stage, y, w.rows, tokens), tokens);
  multiply(stage, {&p, 1});
}

} // namespace waste
