// The encoder of the rotated formats (layouts: weight.hpp), written once for vectors of any width.
//
// `L` is an instruction set: N lanes of int32 and float32, and the two operations that the compiler's vectors have no
// word for. Lanes are rows, so nothing ever crosses lanes, and every float operation is a single IEEE one: the bytes
// are the same whatever N is. All templates take an L of an anonymous namespace, hence no code compiled for one
// instruction set can be linked into another's place.
//
// WT: per row and group of 128, four rings of 32 codes (column mod 4), each found by Viterbi. A window of 6 bits
// starts at every code; window w costs (z - T[w])^2, of which T^2 - 2 z T depends on w. In integers:
// pair (zq, weight) . entry (-16 T, 8 T^2) is one vpdpwssd. All costs are multiples of 2^B, so the predecessor rides
// in the low B bits of the sum and `min` keeps the books; the back pointers of a step fit one int32 per lane.
// The decoder reads forward, so the search runs backward. Closing the ring: once round with free ends; the best path's
// state half-way is fixed; once round from there, which fixes the state at the start; a last round is traced. Twice,
// with the scale refitted by least squares after each. Trying every closing state would take another .4 % off the
// error for 4 to 16 times the time; searching the seam in a narrow band loses 2.3 %.
#pragma once

#include "encode_job.hpp"
#include "simd.hpp"
#include "wt_tables.hpp"

namespace waste {

namespace {

constexpr std::size_t ROWS = 16;
constexpr std::size_t WIDTH = 128;
constexpr int RING = 32;
constexpr std::size_t SCALE_BYTES = 32;
constexpr int UNWEIGHTED = 128;   // the weight in integer costs of a column whose importance nobody gave
constexpr int TARGET = 32640;     // largest |weight * z|
constexpr int UNREACHABLE = 1 << 29; // above any difference two windows can make; with 32 steps of 2^25.3 still int32
constexpr float LARGEST_SQUARES = 1e36f;
constexpr float HALF_MAX = 65504.0f;

// A table in the forms the lanes want.
struct Tables {
  alignas(64) std::int8_t bytes[64];
  alignas(64) float steps[64];
  alignas(64) std::int32_t entries[64]; // int16 pairs: low -16 T, high 8 T^2
  float unit;
};

// A strip group, rotated: x[k][row], and what is known about it.
struct Group {
  alignas(64) float x[WIDTH][ROWS];
  alignas(64) float inverse[ROWS]; // 1 / scale, 0 for rows of zeros
  alignas(64) float along[ROWS];   // sum of importance * code value * weight
  alignas(64) float square[ROWS];  // sum of importance * code value^2
  alignas(64) float importance[WIDTH];
  std::int32_t weight[WIDTH]; // importance as an integer of at most 256
  bool weighted;
};

WASTE_INLINE std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

WASTE_INLINE float float_of(std::uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// To the nearest half, ties to even; |value| <= 65504.
WASTE_INLINE std::uint16_t half_of(float value) {
  const std::uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
  std::uint32_t half;
  if (magnitude < 0x38800000u) { // a subnormal half: adding 1/2 leaves multiples of 2^-24
    half = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  }
  return static_cast<std::uint16_t>(half | (bits >> 16 & 0x8000u));
}

WASTE_INLINE float from_half(std::uint16_t half) {
  const std::uint32_t magnitude = half & 0x7fffu;
  const float value = magnitude < 0x400u ? static_cast<float>(magnitude) * 0x1p-24f
                                         : float_of((magnitude << 13) + (112u << 23));
  return half & 0x8000u ? -value : value;
}

constexpr float ROUND = 12582912.0f; // 1.5 * 2^23: adding it leaves the nearest integer in the low bits, ties to even

WASTE_INLINE std::int32_t nearest(float value) { // |value| < 2^22
  return static_cast<std::int32_t>(bits_of(value + ROUND) - bits_of(ROUND));
}

template <class L> WASTE_INLINE typename L::F spread(float value) { return typename L::F{} + value; }
template <class V> WASTE_INLINE V least(V a, V b) { return a < b ? a : b; }
template <class V> WASTE_INLINE V most(V a, V b) { return a > b ? a : b; }

// ---- from the matrix to a rotated group

// 16 x 128 weights, `stride` apart, transposed by blocks of four.
void transpose(Group &group, const float *w, std::size_t stride) {
  for (std::size_t r = 0; r < ROWS; r += 4) {
    for (std::size_t k = 0; k < WIDTH; k += 4) {
      const float *from = w + r * stride + k;
      const f32x4 a = load<f32x4>(from), b = load<f32x4>(from + stride);
      const f32x4 c = load<f32x4>(from + 2 * stride), d = load<f32x4>(from + 3 * stride);
      const f32x4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
      const f32x4 AB = __builtin_shufflevector(a, b, 2, 6, 3, 7), CD = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      store(&group.x[k][r], __builtin_shufflevector(ab, cd, 0, 1, 4, 5));
      store(&group.x[k + 1][r], __builtin_shufflevector(ab, cd, 2, 3, 6, 7));
      store(&group.x[k + 2][r], __builtin_shufflevector(AB, CD, 0, 1, 4, 5));
      store(&group.x[k + 3][r], __builtin_shufflevector(AB, CD, 2, 3, 6, 7));
    }
  }
}

// Columns first .. first + 127 of a strip, zeros where it ends.
void load_group(Group &group, const EncodeJob &job, std::size_t first) {
  const std::size_t left = job.cols - first;
  if (job.rows == ROWS && left >= WIDTH) {
    return transpose(group, job.w + first, job.cols);
  }
  float padded[ROWS * WIDTH] = {};
  for (std::size_t r = 0; r < job.rows; ++r) {
    __builtin_memcpy(padded + r * WIDTH, job.w + r * job.cols + first, (left < WIDTH ? left : WIDTH) * sizeof(float));
  }
  transpose(group, padded, WIDTH);
}

// Sign flips, then the orthonormal Hadamard transform along k, in place.
template <class L> void rotate(Group &group) {
  using F = typename L::F;
  for (std::size_t k = 0; k < WIDTH; ++k) {
    const float sign = SIGNS[k / 32] >> k % 32 & 1 ? -HADAMARD : HADAMARD;
    for (std::size_t r = 0; r < ROWS; r += L::N) {
      store(&group.x[k][r], load<F>(&group.x[k][r]) * sign);
    }
  }
  for (std::size_t half = 1; half < WIDTH; half *= 2) {
    for (std::size_t begin = 0; begin < WIDTH; begin += 2 * half) {
      for (std::size_t k = begin; k < begin + half; ++k) {
        for (std::size_t r = 0; r < ROWS; r += L::N) {
          const F a = load<F>(&group.x[k][r]), b = load<F>(&group.x[k + half][r]);
          store(&group.x[k][r], a + b);
          store(&group.x[k + half][r], a - b);
        }
      }
    }
  }
}

// Importance of the 128 columns relative to the largest; unusable ones (no positive, or not finite) count as none.
// Integer weights are multiples of `unit`.
void weigh(Group &group, const float *importance, int unit) {
  float largest = 0, total = 0;
  for (std::size_t k = 0; importance != nullptr && k < WIDTH; ++k) {
    largest = importance[k] > largest ? importance[k] : largest;
    total += importance[k];
  }
  group.weighted = largest > 0 && total - total == 0; // false for infinities and NaN
  for (std::size_t k = 0; k < WIDTH; ++k) {
    const float share = group.weighted ? importance[k] / largest : 1.0f;
    const std::int32_t steps = nearest(share * static_cast<float>(256 / unit));
    group.importance[k] = share;
    group.weight[k] = !group.weighted ? UNWEIGHTED : share > 0 ? (steps < 1 ? 1 : steps) * unit : 0;
  }
}

// Sums of squares of the rows.
template <class L> void squares(const Group &group, float *sum) {
  using F = typename L::F;
  for (std::size_t r = 0; r < ROWS; r += L::N) {
    F total{};
    for (std::size_t k = 0; k < WIDTH; ++k) {
      const F x = load<F>(&group.x[k][r]);
      total += x * x;
    }
    store(sum + r, total);
  }
}

// ---- trellis codes

// State: the 6 - B bits behind a code. State s is reached from the windows w = s + STATES * p, p < CHOICES, which
// come out of state w >> B.
template <class L, int B> struct Trellis {
  using I = typename L::I;
  using U = typename L::U;
  static constexpr int STATES = 1 << (6 - B), CHOICES = 1 << B, LOW = CHOICES - 1;

  static WASTE_INLINE void step(I (&cost)[STATES], I pair, I &back, const std::int32_t *entries) {
    I reached[STATES];
#pragma GCC unroll 16
    for (int s = 0; s < STATES; ++s) {
#pragma GCC unroll 16
      for (int p = 0; p < CHOICES; ++p) {
        const int window = s + STATES * p;
        const I from = (cost[window >> B] & ~LOW) | p; // the choice in the low bits, below any cost
        const I sum = L::dot(from, pair, entries + window);
        reached[s] = p == 0 ? sum : least(reached[s], sum);
      }
    }
    I packed{}; // STATES * B = 32, 24 or 16 bits
#pragma GCC unroll 16
    for (int s = STATES - 1; s >= 0; --s) {
      packed = (reached[s] & LOW) | (packed << B);
      cost[s] = reached[s];
    }
    back = packed;
  }

  // The window that led to `state`, which becomes the state it came out of.
  static WASTE_INLINE I trace(I back, I &state) {
    const I choice = (I)((U)back >> (U)(state * B)) & LOW;
    const I window = state + choice * STATES;
    state = window >> B;
    return window;
  }

  static WASTE_INLINE I cheapest(const I (&cost)[STATES]) {
    I low = cost[0], state{};
    for (int s = 1; s < STATES; ++s) {
      state = cost[s] < low ? I{} + s : state;
      low = least(low, cost[s]);
    }
    return state;
  }

  static WASTE_INLINE void start(I (&cost)[STATES], I state) {
    for (int s = 0; s < STATES; ++s) {
      cost[s] = state == s ? I{} : I{} + UNREACHABLE;
    }
  }
};

// All rings of a group at the current scales: code vectors to `codes`, sums for the refit to the group.
template <class L, int B> void search(Group &group, const Tables &tables, std::uint8_t *codes) {
  using T = Trellis<L, B>;
  using I = typename L::I;
  using F = typename L::F;
  for (std::size_t r = 0; r < ROWS; r += L::N) {
    I vectors[4 * B]{}; // byte 4 * row + q; one more q at each turn, from the top byte down
    F along{}, square{};
    const F inverse = load<F>(group.inverse + r);
    for (int q = 3; q >= 0; --q) {
      I pairs[RING], backs[RING], cost[T::STATES]{};
#pragma GCC unroll 1
      for (int m = 0; m < RING; ++m) {
        const std::int32_t weight = group.weight[4 * m + q];
        const F wanted = load<F>(&group.x[4 * m + q][r]) * inverse * static_cast<float>(weight);
        const F kept = least(most(wanted, spread<L>(-TARGET)), spread<L>(TARGET));
        const I target = (I)(kept + ROUND) - static_cast<std::int32_t>(bits_of(ROUND));
        pairs[m] = (target & 0xffff) | (weight << 16);
      }
      // Backward round the ring, from position `from` - 1 to position `from`.
      const auto round = [&](int from) {
#pragma GCC unroll 1
        for (int m = from - 1; m >= 0; --m) {
          T::step(cost, pairs[m], backs[m], tables.entries);
        }
#pragma GCC unroll 1
        for (int m = RING - 1; m >= from; --m) {
          T::step(cost, pairs[m], backs[m], tables.entries);
        }
      };
      round(0);
      I state = T::cheapest(cost);
      for (int m = 0; m < RING / 2; ++m) {
        T::trace(backs[m], state);
      }
      T::start(cost, state);
      round(RING / 2);
      for (int m = RING / 2; m < RING; ++m) {
        T::trace(backs[m], state);
      }
      T::start(cost, state);
      round(0);
      for (I &vector : vectors) {
        vector <<= 8;
      }
      I sixth{};
#pragma GCC unroll 32
      for (int m = 0; m < RING; ++m) {
        const I window = T::trace(backs[m], state), code = window & T::LOW;
        if constexpr (B == 2) {
          vectors[m / 4] |= code << 2 * (m % 4);
        } else if constexpr (B == 4) {
          vectors[m / 2] |= code << 4 * (m % 2);
        } else { // eight codes in three vectors: six in the low 6 bits of each, two in the three spare pairs of bits
          const int i = m % 8, v = m / 8 * 3;
          if (i < 6) {
            vectors[v + i / 2] |= code << 3 * (i % 2);
          } else if (i == 6) {
            sixth = code;
          } else {
            const I spare = sixth | code << 3;
            vectors[v] |= (spare & 3) << 6;
            vectors[v + 1] |= (spare & 12) << 4;
            vectors[v + 2] |= (spare & 48) << 2;
          }
        }
        const F value = L::look(window, tables);
        const F weighed = group.weighted ? value * group.importance[4 * m + q] : value;
        along += weighed * load<F>(&group.x[4 * m + q][r]);
        square += weighed * value;
      }
    }
    for (std::size_t v = 0; v < 4 * B; ++v) {
      store(codes + 64 * v + 4 * r, vectors[v]);
    }
    store(group.along + r, along);
    store(group.square + r, square);
  }
}

// Stores the scales that fit best; whether one had to be clipped.
WASTE_INLINE bool put_scales(const float *scale, std::uint8_t *out) {
  bool clipped = false;
  for (std::size_t r = 0; r < ROWS; ++r) {
    float wanted = scale[r] * SCALE_FACTOR;
    if (wanted > HALF_MAX || wanted < -HALF_MAX) {
      wanted = wanted > 0 ? HALF_MAX : -HALF_MAX;
      clipped = true;
    }
    const std::uint16_t half = half_of(wanted);
    __builtin_memcpy(out + 2 * r, &half, sizeof half);
  }
  return clipped;
}

template <class L, int B>
bool encode_rings(Group &group, const Tables &tables, const float *sums, std::uint8_t *out) {
  float scale[ROWS];
  for (std::size_t r = 0; r < ROWS; ++r) {
    const float rms = __builtin_sqrtf(sums[r] / static_cast<float>(WIDTH));
    group.inverse[r] = rms > 0 ? tables.unit / rms : 0.0f;
  }
  for (int pass = 0; pass < 2; ++pass) {
    search<L, B>(group, tables, out + SCALE_BYTES);
    for (std::size_t r = 0; r < ROWS; ++r) {
      const bool fits = sums[r] > 0 && group.square[r] > 0;
      scale[r] = fits ? group.along[r] / group.square[r] : 0.0f;
      group.inverse[r] = scale[r] > 1e-36f ? 1.0f / scale[r] : 0.0f;
    }
  }
  return put_scales(scale, out);
}

// ---- 6-bit codes

// Scales tried per row, as multiples of the one that puts the largest weight on code -32; see q4.
constexpr float CANDIDATES[] = {0.88f, 0.92f, 0.95f, 0.97f, 0.99f, 1.01f, 1.03f, -1.0f};

template <class L> WASTE_INLINE typename L::F six_bit(typename L::F wanted) {
  const auto kept = least(most(wanted, spread<L>(-32.0f)), spread<L>(31.0f));
  return (kept + ROUND) - ROUND;
}

// The least squares scale of the codes at 1 / scale = `inverse`, and the squared error it takes away.
template <class L>
WASTE_INLINE void fit(const Group &group, std::size_t r, typename L::F inverse, typename L::F &scale,
                      typename L::F &gain) {
  using F = typename L::F;
  F along{}, square{};
  for (std::size_t k = 0; k < WIDTH; ++k) {
    const F x = load<F>(&group.x[k][r]), code = six_bit<L>(x * inverse);
    const F weighed = group.weighted ? code * group.importance[k] : code;
    along += weighed * x;
    square += weighed * code;
  }
  scale = square > 0.0f ? along / square : F{};
  gain = scale * along;
}

template <class L> WASTE_INLINE typename L::F reciprocal(typename L::F value) {
  using F = typename L::F;
  const F magnitude = value < 0.0f ? -value : value;
  return magnitude > 1e-36f ? 1.0f / value : F{};
}

template <class L> bool encode_q6(Group &group, std::uint8_t *out) {
  using I = typename L::I;
  using F = typename L::F;
  float scale[ROWS], inverse[ROWS];
  for (std::size_t r = 0; r < ROWS; r += L::N) {
    F high{}, low{};
    for (std::size_t k = 0; k < WIDTH; ++k) {
      const F x = load<F>(&group.x[k][r]);
      high = most(high, x);
      low = least(low, x);
    }
    const F base = (high >= -low ? -high : -low) * (1.0f / 32.0f);
    F best = F{} - 1.0f, chosen{};
    for (const float candidate : CANDIDATES) {
      F fitted, gain;
      fit<L>(group, r, reciprocal<L>(base * candidate), fitted, gain);
      chosen = gain > best ? fitted : chosen;
      best = most(gain, best);
    }
    F fitted, gain;
    fit<L>(group, r, reciprocal<L>(chosen), fitted, gain);
    store(scale + r, fitted);
  }
  const bool clipped = put_scales(scale, out);
  for (std::size_t r = 0; r < ROWS; ++r) { // the codes follow from the scale as stored
    std::uint16_t half;
    __builtin_memcpy(&half, out + 2 * r, sizeof half);
    const float stored = from_half(half) / SCALE_FACTOR;
    inverse[r] = stored != 0.0f ? 1.0f / stored : 0.0f;
  }
  for (std::size_t r = 0; r < ROWS; r += L::N) {
    for (std::size_t block = 0; block < 8; ++block) { // 16 columns: two vectors of low bits, one of high bits
      I vectors[3]{};
      for (std::size_t i = 0; i < 4; ++i) {
        for (std::size_t q = 0; q < 4; ++q) {
          const F x = load<F>(&group.x[16 * block + 4 * i + q][r]);
          const I code = __builtin_convertvector(six_bit<L>(x * load<F>(inverse + r)), I) + 32;
          vectors[i / 2] |= (code & 15) << static_cast<int>(8 * q + 4 * (i % 2));
          vectors[2] |= (code >> 4) << static_cast<int>(8 * q + 2 * i);
        }
      }
      for (std::size_t v = 0; v < 3; ++v) {
        store(out + SCALE_BYTES + 64 * (3 * block + v) + 4 * r, vectors[v]);
      }
    }
  }
  return clipped;
}

// ---- strips

template <class L, int B> EncodeLoss encode_groups(const EncodeJob &job, const WtTable &table) {
  Tables tables;
  tables.unit = table.unit;
  for (int w = 0; w < 64; ++w) {
    const int t = table.steps[w];
    tables.bytes[w] = table.steps[w];
    tables.steps[w] = static_cast<float>(t);
    tables.entries[w] = static_cast<std::int32_t>(static_cast<std::uint32_t>(8 * t * t) << 16 |
                                                  (static_cast<std::uint32_t>(-16 * t) & 0xffffu));
  }
  constexpr std::size_t bytes = SCALE_BYTES + 256 * B;
  EncodeLoss loss{0, 0};
  Group group;
  std::uint8_t *out = job.out;
  for (std::size_t first = 0; first < job.cols; first += WIDTH, out += bytes) {
    load_group(group, job, first);
    rotate<L>(group);
    weigh(group, job.importance == nullptr ? nullptr : job.importance + first, B == 4 ? 2 : 1);
    alignas(64) float sums[ROWS];
    squares<L>(group, sums);
    bool bad = false;
    for (std::size_t r = 0; r < ROWS; ++r) {
      bad |= !(sums[r] < LARGEST_SQUARES);
    }
    if (bad) {
      ++loss.bad;
      __builtin_memset(out, 0, bytes);
      continue;
    }
    if constexpr (B == 6) {
      loss.saturated += encode_q6<L>(group, out);
    } else {
      loss.saturated += encode_rings<L, B>(group, tables, sums, out);
    }
  }
  return loss;
}

template <class L> EncodeLoss encode_strip(const EncodeJob &job) {
  switch (job.format) {
  case 4:
    return encode_groups<L, 2>(job, WT2);
  case 5:
    return encode_groups<L, 3>(job, WT3);
  case 6:
    return encode_groups<L, 4>(job, WT4);
  default:
    return encode_groups<L, 6>(job, WT4); // q6 has no table
  }
}

} // namespace

} // namespace waste
