// Matrix products: inputs of strip formats turned into 8 bits once, then items of runs of 16-row blocks times runs of
// tokens.
#include "linear.hpp"

#include "int8.hpp"
#include "lanes/lanes.hpp"

#include <algorithm>
#include <cstring>

namespace waste {

namespace {

// Multiply-adds of an item: large against the claim of an item, small against the whole. An item of 8-bit products is
// done ten times as fast.
constexpr std::size_t ITEM = 1 << 16, ITEM_INT8 = 1 << 18;

struct Cut {
  std::size_t first;  // item number
  std::size_t blocks; // of 16 rows per item
  std::size_t runs;   // items along the rows
  std::size_t tokens; // per item
};

// A product of a strip format: its inputs in 8 bits, and packed for runs of MANY where that pays.
struct Inputs {
  const Int8Vector *x;
  std::byte *packed;
  std::size_t packed_run; // bytes of a whole run
};

bool is_many(std::size_t tokens) { return tokens > FEW; }

// Whether a product's inputs are packed, and the bytes from one run to the next: of those vectors there are, since most
// experts of a prompt have few.
bool is_packed(const Int8Kernels &kernels, const Product &p) {
  return kernels.pack != nullptr && strips(p.w->format) && is_many(p.tokens);
}

std::size_t packed_run(const Int8Kernels &kernels, const Product &p) {
  return ceil_div(kernels.packed_bytes(p.w->groups(), std::min(MANY, p.tokens)), VECTOR) * VECTOR;
}

// An input that products may share: the same numbers, rotated or not, as so many groups.
struct Source {
  const float *x;
  std::size_t cols;
  bool rotate;
  Int8Vector out;

  bool operator==(const Source &other) const {
    return x == other.x && cols == other.cols && rotate == other.rotate;
  }
};

// Every distinct input once, however many products read it: an open table of indices, never more than half full.
class Sources {
public:
  Sources(Stage &stage, std::size_t most) : size_(64) {
    while (size_ < 2 * most) {
      size_ *= 2;
    }
    table_ = stage.array<std::int32_t>(size_);
    std::fill(table_, table_ + size_, -1);
    all_ = stage.array<Source>(most);
  }

  std::size_t index(const Source &wanted) {
    std::size_t at = (reinterpret_cast<std::uintptr_t>(wanted.x) / 64 + wanted.cols + wanted.rotate) *
                     0x9e3779b97f4a7c15ull % size_;
    while (table_[at] >= 0) {
      if (all_[table_[at]] == wanted) {
        return static_cast<std::size_t>(table_[at]);
      }
      at = (at + 1) % size_;
    }
    table_[at] = static_cast<std::int32_t>(count_);
    all_[count_] = wanted;
    return count_++;
  }

  std::size_t count() const { return count_; }
  Source &operator[](std::size_t i) { return all_[i]; }

private:
  std::size_t size_, count_ = 0;
  std::int32_t *table_;
  Source *all_;
};

// Memory cut off the front of one block of passing floats.
class Block {
public:
  Block(Stage &stage, std::size_t bytes)
      : next_(reinterpret_cast<std::byte *>(stage.passing_floats(ceil_div(bytes, sizeof(float))))) {}

  static std::size_t rounded(std::size_t bytes) { return ceil_div(bytes, VECTOR) * VECTOR; }

  template <class T> T *take(std::size_t count) {
    T *place = reinterpret_cast<T *>(next_);
    next_ += rounded(count * sizeof(T));
    return place;
  }

private:
  std::byte *next_;
};

// Whether a product reads the very vectors of another, as gate and up do.
bool same_inputs(const Product &a, const Product &b) {
  return a.x == b.x && a.tokens == b.tokens && a.w->cols == b.w->cols && rotated(a.w->format) == rotated(b.w->format);
}

// The inputs of all products of strip formats.
Inputs *prepare(Stage &stage, const Int8Kernels &kernels, std::span<const Product> products) {
  std::size_t most = 0;
  for (const Product &p : products) {
    most += strips(p.w->format) ? p.tokens : 0;
  }
  if (most == 0) {
    return nullptr;
  }
  Inputs *inputs = stage.array<Inputs>(products.size());
  Sources sources(stage, most);
  std::int32_t *chosen = stage.array<std::int32_t>(most);
  Int8Vector *vectors = stage.array<Int8Vector>(most);
  struct Pack {
    std::size_t product, run, first; // `first` counts from the start of the run
  };
  std::size_t *firsts = stage.array<std::size_t>(products.size());
  std::size_t count = 0, packs = 0, bytes = 0, last = products.size();
  for (std::size_t i = 0; i < products.size(); ++i) {
    const Product &p = products[i];
    if (!strips(p.w->format)) {
      continue;
    }
    if (last < i && same_inputs(products[last], p)) {
      firsts[i] = firsts[last];
      continue;
    }
    last = i;
    firsts[i] = count;
    for (std::size_t t = 0; t < p.tokens; ++t) {
      chosen[count++] = static_cast<std::int32_t>(sources.index({p.x[t], p.w->cols, rotated(p.w->format), {}}));
    }
    packs += ceil_div(p.tokens, PACKED);
    bytes += is_packed(kernels, p) ? ceil_div(p.tokens, MANY) * packed_run(kernels, p) : 0;
  }
  std::size_t work = 0;
  for (std::size_t i = 0; i < sources.count(); ++i) {
    const std::size_t groups = ceil_div(sources[i].cols, GROUP);
    bytes += Block::rounded(groups * GROUP) + 2 * Block::rounded(groups * sizeof(float));
    work += 8 * sources[i].cols; // rotation: signs and 7 additions each
  }
  Block block(stage, bytes);
  for (std::size_t i = 0; i < sources.count(); ++i) {
    const std::size_t groups = ceil_div(sources[i].cols, GROUP);
    sources[i].out = {block.take<std::int8_t>(groups * GROUP), block.take<float>(groups),
                      block.take<std::int32_t>(groups)};
  }
  const InputLanes &input = lanes().input;
  stage.parallel(sources.count(), work, [&](std::size_t i, std::size_t) {
    const Source &source = sources[i];
    input.quantise(source.x, source.cols, source.rotate, source.out.codes, source.out.scales, source.out.sums);
  });
  for (std::size_t i = 0; i < count; ++i) {
    vectors[i] = sources[static_cast<std::size_t>(chosen[i])].out;
  }
  Pack *todo = stage.array<Pack>(packs);
  std::size_t runs = 0, moved = 0;
  last = products.size();
  for (std::size_t i = 0; i < products.size(); ++i) {
    const Product &p = products[i];
    if (!strips(p.w->format)) {
      continue;
    }
    if (last < i && same_inputs(products[last], p)) {
      inputs[i] = inputs[last];
      continue;
    }
    last = i;
    inputs[i] = {vectors + firsts[i], nullptr, 0};
    if (is_packed(kernels, p)) {
      inputs[i].packed_run = packed_run(kernels, p);
      inputs[i].packed = block.take<std::byte>(ceil_div(p.tokens, MANY) * inputs[i].packed_run);
      for (std::size_t t = 0; t < p.tokens; t += PACKED) {
        todo[runs++] = {i, t / MANY * MANY, t % MANY};
      }
      moved += p.tokens * p.w->cols / 8;
    }
  }
  stage.parallel(runs, moved, [&](std::size_t i, std::size_t) {
    const Pack &part = todo[i];
    const Product &p = products[part.product];
    const Inputs &in = inputs[part.product];
    kernels.pack(in.x + part.run, p.w->groups(), std::min(MANY, p.tokens - part.run), part.first,
                 in.packed + part.run / MANY * in.packed_run);
  });
  return inputs;
}

// Most blocks whose sums are held back, so that each vector's output is written in pieces of 512 bytes: vectors lie a
// power of two apart as a rule, and single lines of all of them fall into the same few sets of the cache.
constexpr std::size_t HELD = 8;

// out (blocks, count, 16) = `blocks` <= HELD blocks of w from `first` on, times `count` vectors from `token` on.
void multiply_blocks(const Int8Kernels &kernels, const Weight &w, const Product &p, const Inputs &in,
                     std::size_t first, std::size_t blocks, std::size_t token, std::size_t count, float *out) {
  const std::size_t groups = w.groups();
  if (!is_many(p.tokens)) { // then count <= FEW
    return kernels.few(w.format, w.strip(first), blocks, groups, in.x + token, count, out);
  }
  const void *packed = in.packed == nullptr ? nullptr : in.packed + token / MANY * in.packed_run;
  for (std::size_t b = 0; b < blocks; b += kernels.together) {
    kernels.many(w.format, w.strip(first + b), std::min(kernels.together, blocks - b), groups, in.x + token, packed,
                 count, out + b * count * STRIP);
  }
}

// Rows of blocks `begin` to `end` of a product of a strip format, for `count` vectors from `token` on.
void multiply_strips(const Int8Kernels &kernels, const Product &p, const Inputs &in, std::size_t begin,
                     std::size_t end, std::size_t token, std::size_t count) {
  alignas(64) float out[HELD * MANY * STRIP]; // 64 KiB
  for (std::size_t first = begin; first < end; first += HELD) {
    const std::size_t blocks = std::min(HELD, end - first);
    if (p.gate == nullptr) {
      multiply_blocks(kernels, *p.w, p, in, first, blocks, token, count, out);
    } else {
      alignas(64) float up[HELD * MANY * STRIP];
      multiply_blocks(kernels, *p.gate, p, in, first, blocks, token, count, out);
      multiply_blocks(kernels, *p.w, p, in, first, blocks, token, count, up);
      lanes().vector.swiglu(out, up, blocks * count * STRIP, p.limit);
    }
    for (std::size_t t = 0; t < count; ++t) {
      for (std::size_t b = 0; b < blocks; ++b) {
        const std::size_t base = (first + b) * STRIP, top = std::max(base, p.begin);
        const std::size_t bottom = std::min(base + STRIP, p.end);
        std::memcpy(p.y[token + t] + (top - p.begin), out + (b * count + t) * STRIP + (top - base),
                    (bottom - top) * sizeof(float));
      }
    }
  }
}

Cut cut(const Product &p, const Int8Kernels &kernels, std::size_t threads) {
  const bool int8 = strips(p.w->format);
  const std::size_t tokens = int8 ? MANY : TOKENS, item = int8 ? ITEM_INT8 : ITEM;
  const std::size_t blocks = ceil_div(p.end, STRIP) - p.begin / STRIP;
  std::size_t per = std::max<std::size_t>(1, item / (STRIP * p.w->cols * std::clamp<std::size_t>(p.tokens, 1, tokens)));
  if (int8 && is_many(p.tokens)) {
    // As many as are held together, if that leaves a few items for every thread.
    per = blocks >= 4 * HELD * threads ? HELD : ceil_div(per, kernels.together) * kernels.together;
  }
  return {0, per, ceil_div(blocks, per), tokens};
}

} // namespace

void multiply(Stage &stage, std::span<const Product> products) {
  const Int8Kernels &kernels = int8_kernels();
  const Inputs *inputs = prepare(stage, kernels, products);
  Cut *cuts = stage.array<Cut>(products.size());
  std::size_t items = 0, work = 0;
  for (std::size_t i = 0; i < products.size(); ++i) {
    const Product &p = products[i];
    cuts[i] = Cut{items, 1, 1, TOKENS};
    if (p.tokens > 0 && p.begin < p.end) {
      cuts[i] = cut(p, kernels, stage.threads());
      cuts[i].first = items;
      items += cuts[i].runs * ceil_div(p.tokens, cuts[i].tokens);
      work += (p.end - p.begin) * p.w->cols * p.tokens * (p.gate != nullptr ? 2 : 1) / (strips(p.w->format) ? 4 : 1);
    }
  }
  stage.parallel(items, work, [&](std::size_t item, std::size_t) {
    // The last product that starts at or before this item; empty ones share their start with the next.
    const Cut *c = std::upper_bound(cuts, cuts + products.size(), item,
                                    [](std::size_t value, const Cut &cut) { return value < cut.first; }) -
                   1;
    const std::size_t index = static_cast<std::size_t>(c - cuts), local = item - c->first;
    const Product &p = products[index];
    const std::size_t token = local / c->runs * c->tokens, count = std::min(c->tokens, p.tokens - token);
    const std::size_t begin = p.begin / STRIP + local % c->runs * c->blocks;
    const std::size_t end = std::min(begin + c->blocks, ceil_div(p.end, STRIP));
    if (strips(p.w->format)) {
      multiply_strips(kernels, p, inputs[index], begin, end, token, count);
    } else {
      dot_rows(*p.w, std::max(begin * STRIP, p.begin), std::min(end * STRIP, p.end), p.x + token, count, p.y + token,
               p.begin);
    }
  });
}

void multiply_f64(Stage &stage, const Weight &given, const float *const *x, double *const *y, std::size_t tokens) {
  Weight w = given;
  const std::size_t blocks = ceil_div(w.rows, STRIP);
  if (strips(w.format)) { // no model stores such a matrix in few bits; whoever does pays for it
    float *floats = stage.floats(w.rows * w.cols);
    stage.parallel(blocks, w.rows * w.cols, [&](std::size_t block, std::size_t) {
      decode_block(given, block, floats + block * STRIP * given.cols);
    });
    w = {reinterpret_cast<const std::uint8_t *>(floats), Format::f32, w.rows, w.cols};
  }
  const std::size_t per =
      std::max<std::size_t>(1, ITEM / (STRIP * w.cols * std::clamp<std::size_t>(tokens, 1, TOKENS)));
  const std::size_t runs = ceil_div(blocks, per);
  stage.parallel(runs * ceil_div(tokens, TOKENS), w.rows * w.cols * tokens, [&](std::size_t item, std::size_t) {
    const std::size_t token = item / runs * TOKENS, count = std::min(TOKENS, tokens - token);
    const std::size_t begin = item % runs * per * STRIP, end = std::min(begin + per * STRIP, w.rows);
    dot_rows_f64(w, begin, end, x + token, count, y + token);
  });
}

void linear(Pool &pool, const float *x, const Weight &w, float *y, std::size_t tokens) {
  Stage stage(pool);
  const Product p = product(w, rows_of(stage, x, w.cols, tokens), rows_of(stage, y, w.rows, tokens), tokens);
  multiply(stage, {&p, 1});
}

} // namespace waste
