// Products with inputs of 8 bits for AMX: from a few vectors on, tiles of 16 vectors by 16 rows by 64 columns.
//
// A decoded vector, 16 rows times 4 columns, is one row of a B tile as it stands. Two strips share every A tile; the
// four B tiles of their group stay in tile registers while all vectors pass.
#include "int8_avx512.hpp"

namespace {

constexpr std::size_t ROWS = PACKED;         // of a tile
constexpr std::size_t HALF = ROWS * VECTOR;  // bytes of an A or B tile: half a group
constexpr std::size_t TILE_BYTES = 2 * HALF; // of a group
constexpr std::size_t STRIPS = 2;

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start = 0, reserved[14] = {};
  std::uint16_t bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// What lies there is in memory when this is passed, and may change there. GCC 12 believes that instructions touch 8
// bytes of a configuration, not 64, and that loads of tiles read nothing: it could drop stores, or move them behind the
// loads.
WASTE_INLINE void settle(const void *memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

WASTE_INLINE void load_config(const TileConfig &config) {
  settle(&config);
  _tile_loadconfig(&config);
}

// Gives all tiles their shape and returns the one they had: some libraries configure a thread once and for all.
WASTE_INLINE TileConfig configure() {
  TileConfig before, config;
  _tile_storeconfig(&before);
  settle(&before);
  for (int i = 0; i < 8; ++i) {
    config.bytes[i] = VECTOR;
    config.rows[i] = ROWS;
  }
  load_config(config);
  return before;
}

WASTE_INLINE void restore(const TileConfig &before) {
  if (before.palette != 0) {
    load_config(before);
  } else {
    _tile_release();
  }
}

constexpr std::size_t tiles(std::size_t tokens) { return ceil_div(tokens, ROWS); }

// Per group: the A tiles of all vectors, then their scales. Missing vectors of the last tile are zero.
constexpr std::size_t group_size(std::size_t tokens) { return tiles(tokens) * (TILE_BYTES + ROWS * sizeof(float)); }

static std::size_t packed_bytes(std::size_t groups, std::size_t tokens) { return groups * group_size(tokens); }

// One token after the other: reads run along a row, and writes never meet in one set of the cache.
static void pack(const Int8Vector *x, std::size_t groups, std::size_t tokens, std::size_t first, void *packed) {
  const std::size_t size = group_size(tokens), scales = tiles(tokens) * TILE_BYTES + first * sizeof(float);
  std::uint8_t *tile = static_cast<std::uint8_t *>(packed) + first / ROWS * TILE_BYTES;
  for (std::size_t i = 0; i < ROWS; ++i) {
    const bool there = first + i < tokens;
    for (std::size_t g = 0; g < groups; ++g) {
      const std::int8_t *codes = there ? x[first + i].codes + g * GROUP : nullptr;
      std::uint8_t *row = tile + g * size + i * VECTOR;
      _mm512_storeu_si512(row, there ? _mm512_loadu_si512(codes) : _mm512_setzero_si512());
      _mm512_storeu_si512(row + HALF, there ? _mm512_loadu_si512(codes + VECTOR) : _mm512_setzero_si512());
      const float scale = there ? x[first + i].scales[g] : 0.0f;
      __builtin_memcpy(static_cast<std::uint8_t *>(packed) + g * size + scales + i * sizeof(float), &scale,
                       sizeof scale);
    }
  }
}

// out (16, 16) += tile (vectors, rows) of whole numbers, scaled.
WASTE_INLINE void add_tile(const std::int32_t *tile, __m512 weight_scales, const float *scales, std::size_t count,
                           float *out) {
  const auto add_row = [&](std::size_t i) __attribute__((always_inline)) {
    const V sums = _mm512_load_si512(tile + i * STRIP);
    _mm512_storeu_ps(out + i * STRIP, accumulate(_mm512_loadu_ps(out + i * STRIP), sums, weight_scales, scales[i]));
  };
  if (count == ROWS) {
#pragma GCC unroll 16
    for (std::size_t i = 0; i < ROWS; ++i) {
      add_row(i);
    }
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    add_row(i);
  }
}

template <Format FORMAT>
static void many_of(const std::uint8_t *strip, std::size_t strips, std::size_t groups, const void *packed,
                    std::size_t tokens, float *out) {
  const Tables t = tables<FORMAT, true>();
  const std::size_t bytes = groups * group_bytes(FORMAT), count_tiles = tiles(tokens);
  const std::uint8_t *second = strip + (strips - 1) * bytes;
  float *out2 = out + (strips - 1) * tokens * STRIP;
  __builtin_memset(out, 0, strips * tokens * STRIP * sizeof(float));
  alignas(64) std::int8_t weights[STRIPS][TILE_BYTES];
  alignas(64) std::int32_t sums[2][STRIPS][ROWS * STRIP];
  const auto decode = [&](const std::uint8_t *from, std::int8_t *to) __attribute__((always_inline)) {
    each_quad<FORMAT, true, false>(from + SCALES, t, [&](std::size_t j, V v) __attribute__((always_inline)) {
      _mm512_store_si512(to + j * VECTOR, v);
    });
    settle(to);
  };
  const TileConfig before = configure();
  for (std::size_t g = 0; g < groups; ++g) {
    const std::uint8_t *from = strip + g * group_bytes(FORMAT), *from2 = second + g * group_bytes(FORMAT);
    const std::uint8_t *a = static_cast<const std::uint8_t *>(packed) + g * group_size(tokens);
    const float *scales = reinterpret_cast<const float *>(a + count_tiles * TILE_BYTES);
    // The next group's bytes are asked for a few lines at a time, beside the products: all at once they would have to
    // wait for each other. After the last group come the next two strips.
    const std::uint8_t *next = g + 1 < groups ? from + group_bytes(FORMAT) : second + bytes;
    const std::uint8_t *next2 = g + 1 < groups ? from2 + group_bytes(FORMAT) : second + 2 * bytes;
    const std::size_t lines = ceil_div(group_bytes(FORMAT), VECTOR) * strips, each = ceil_div(lines, count_tiles);
    std::size_t line = 0;
    decode(from, weights[0]);
    _tile_loadd(4, weights[0], VECTOR);
    _tile_loadd(5, weights[0] + HALF, VECTOR);
    const __m512 weight_scales = scales_at(from), weight_scales2 = scales_at(from2);
    if (strips == 2) {
      decode(from2, weights[1]);
      _tile_loadd(6, weights[1], VECTOR);
      _tile_loadd(7, weights[1] + HALF, VECTOR);
    }
    for (std::size_t i = 0, which = 0; i < tokens; i += ROWS, a += TILE_BYTES, which ^= 1) {
      const std::size_t count = tokens - i < ROWS ? tokens - i : ROWS;
      for (const std::size_t until = line + each; line < until; ++line) {
        _mm_prefetch(reinterpret_cast<const char *>((line % 2 == 0 ? next : next2) + line / 2 * VECTOR), _MM_HINT_T0);
      }
      _tile_zero(0);
      _tile_loadd(2, a, VECTOR);
      _tile_loadd(3, a + HALF, VECTOR);
      _tile_dpbssd(0, 2, 4);
      _tile_dpbssd(0, 3, 5);
      _tile_stored(0, sums[which][0], VECTOR);
      if (strips == 2) {
        _tile_zero(1);
        _tile_dpbssd(1, 2, 6);
        _tile_dpbssd(1, 3, 7);
        _tile_stored(1, sums[which][1], VECTOR);
      }
      add_tile(sums[which][0], weight_scales, scales + i, count, out + i * STRIP);
      if (strips == 2) {
        add_tile(sums[which][1], weight_scales2, scales + i, count, out2 + i * STRIP);
      }
    }
  }
  restore(before);
}

static void many(Format format, const std::uint8_t *strip, std::size_t strips, std::size_t groups, const Int8Vector *,
                 const void *packed, std::size_t tokens, float *out) {
  with_strip_format(format, [&]<Format FORMAT>() { many_of<FORMAT>(strip, strips, groups, packed, tokens, out); });
}

} // namespace

const waste::Int8Kernels waste::INT8_AMX = {few, many, STRIPS, packed_bytes, pack};
