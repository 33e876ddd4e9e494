// Quantizes weights to integers and packs them into panels. Included inside namespace octavo::OCTAVO_LEVEL.
//
// Layouts: ops.h. A group is a range of k that shares a scale; w = scale * q, or scale * q + offset if there are offsets.

static inline std::int64_t num_k_tiles(std::int64_t in_size) { return ceil_div(in_size, kTileK); }
static inline std::int64_t num_groups(const Integers& form, std::int64_t in_size) {
  return form.group_size ? ceil_div(in_size, form.group_size) : 1;
}
static inline std::int64_t k_tile_bytes(const Integers& form) {
  return form.is_two_level ? kTwoLevelBytes : 2 * kTileBytes * form.bits / 8;
}
// The size of an output in floats, padded to whole k tiles.
static inline std::int64_t wide_size(const PackIntegersArgs& args) { return num_k_tiles(args.in_size) * kTileK; }
static inline std::int64_t panel_bytes(const Integers& form, std::int64_t in_size) {
  return num_k_tiles(in_size) * k_tile_bytes(form);
}

// Rounds to nearest, ties to even; for |value| < 2^22.
static inline f32x16 round_to_integers(f32x16 value) {
#if defined(OCTAVO_HAS_AVX512)
  return (f32x16)_mm512_roundscale_ps((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m256 low = _mm256_round_ps((__m256)value.low, kMode), high = _mm256_round_ps((__m256)value.high, kMode);
  return {(f32x16::Half)low, (f32x16::Half)high};
#else
  asm("" : "+m"(value));  // keeps the compiler from fusing the product before with this sum
  return value + 12582912.0f - 12582912.0f;
#endif
}

static inline f32x16 bounded(f32x16 value, float low, float high) {
  const f32x16 above = select(value < low, splat(low), value);
  return select(above > high, splat(high), above);
}

// The squared error of a group rounded to multiples of `scale` in [-most, 7 or most].
static inline float error_of_scale(const float* values, std::int64_t count, float scale, float low, float high) {
  const float inverse = 1.0f / scale;
  f32x16 sum = splat(0.0f);
  for (std::int64_t i = 0; i < count; i += 16) {
    const f32x16 value = load_f32(values + i);
    const f32x16 error = value - bounded(round_to_integers(value * inverse), low, high) * scale;
    sum += error * error;
  }
  return sum_of_lanes(sum);
}

// The scale of a group of 4-bit integers: of those that scale its largest value to -6.5 ... -10 (clipped at -8), the one
// with the least squared error. The sign is such that the largest value becomes negative.
static inline float best_scale(const float* values, std::int64_t count, float extreme) {
  float best = extreme / -8.0f, least = error_of_scale(values, count, best, -8.0f, 7.0f);
  for (const float reach : {6.5f, 7.0f, 7.5f, 8.5f, 9.0f, 9.5f, 10.0f}) {
    const float scale = extreme / -reach, error = error_of_scale(values, count, scale, -8.0f, 7.0f);
    if (error < least) least = error, best = scale;
  }
  return best;
}

static inline float farthest_from_zero(const float* values, std::int64_t count) {
  f32x16 low = splat(0.0f), high = splat(0.0f);
  for (std::int64_t i = 0; i < count; i += 16) {
    const f32x16 value = load_f32(values + i);
    low = select(value < low, value, low);
    high = select(value > high, value, high);
  }
  const float least = -max_of_lanes(-low), most = max_of_lanes(high);
  return -least > most ? least : most;
}

// One group of one output, `values` followed by zeros up to a multiple of 16: returns its scale.
static inline float quantize_group(const float* values, std::int64_t count, int bits, std::int8_t* to) {
  const float extreme = farthest_from_zero(values, count);
  // A group of zeros, or negligible next to any activation.
  if (__builtin_fabsf(extreme) < 1e-30f) {
    __builtin_memset(to, 0, static_cast<std::size_t>(count));
    return 0.0f;
  }
  const float scale = bits == 8 ? __builtin_fabsf(extreme) / 127.0f : best_scale(values, count, extreme);
  const float low = bits == 8 ? -127.0f : -8.0f, high = bits == 8 ? 127.0f : 7.0f, inverse = 1.0f / scale;
  for (std::int64_t i = 0; i < count; i += 16) {
    const f32x16 rounded = bounded(round_to_integers(load_f32(values + i) * inverse), low, high);
    std::int8_t integers[16];
    for (int lane = 0; lane < 16; ++lane) integers[lane] = static_cast<std::int8_t>(rounded[lane]);
    __builtin_memcpy(to + i, integers, static_cast<std::size_t>(smaller(16, count - i)));
  }
  return scale;
}

// One output [K] in floats, rotated if its form is, with zeros up to `wide_size`.
static inline void widen_output(const PackIntegersArgs& args, std::int64_t row, float* wide) {
  const auto load = [&](std::int64_t at, std::int64_t count) {
    at += row * args.in_size;
    return args.is_float16 ? load_part(static_cast<const f16*>(args.weight) + at, count)
                           : load_part(static_cast<const bf16*>(args.weight) + at, count);
  };
  for (std::int64_t k = 0; k < wide_size(args); k += kTileK) {
    f32x16 values[4];
    for (int i = 0; i < 4; ++i) {
      const std::int64_t at = k + i * 16;
      values[i] = load(at, larger(0, smaller(16, args.in_size - at)));
    }
    if (args.form.is_rotated && k + kTileK <= args.in_size) rotate_block(values);
    for (int i = 0; i < 4; ++i) store_f32(wide + k + i * 16, values[i]);
  }
  if (args.form.mixes_blocks) mix_blocks(wide, args.in_size);
}

#include "integer_rounding.inc.h"

// Outputs [K], at most 16: their integers, and a scale for each group. `wide` has room for `wide_size` floats of each.
static inline void quantize_outputs(const PackIntegersArgs& args, std::int64_t row, std::int64_t count, const float* feedback,
                                    float* wide, const OutputIntegers& to) {
  const std::int64_t groups = num_groups(args.form, args.in_size);
  const std::int64_t group_size = args.form.group_size ? args.form.group_size : args.in_size;
  for (std::int64_t lane = 0; lane < count; ++lane) {
    float* values = wide + lane * wide_size(args);
    widen_output(args, row + lane, values);
    if (args.form.is_two_level) continue;
    for (std::int64_t group = 0; group < groups; ++group) {
      const std::int64_t first = group * group_size, size = smaller(group_size, args.in_size - first);
      to.scales[lane * groups + group] = quantize_group(values + first, size, args.form.bits, to.values + lane * args.in_size + first);
    }
  }
  if (args.form.is_two_level) round_outputs(args, count, wide, feedback, to);
}

static inline OutputIntegers integers_of(const PackIntegersArgs& args, const OutputIntegers& all, std::int64_t row) {
  std::int8_t* multipliers = args.form.is_two_level ? all.multipliers + row * ceil_div(args.in_size, kTwoLevelGroup) : nullptr;
  return {all.values + row * args.in_size, multipliers, all.scales + row * num_groups(args.form, args.in_size)};
}

static inline const float* feedback_of(const PackIntegersArgs& args, Pool& pool) {
  return args.weight && args.form.is_two_level && args.form.is_rotated ? error_feedback(args, pool) : nullptr;
}

static void quantize(const PackIntegersArgs& args, Pool& pool) {
  const std::int64_t num_rows = args.out_size * (args.is_gated ? 2 : 1), size = wide_size(args) * kStrip;
  const std::int64_t together = ceil_div(num_rows, 1024 * kStrip) * kStrip;
  const float* feedback = feedback_of(args, pool);
  pool.run(ceil_div(num_rows, together), [&](std::int64_t chunk) {
    float* wide = static_cast<float*>(thread_scratch().bytes(static_cast<std::size_t>(size) * sizeof(float)));
    const std::int64_t stop = smaller(num_rows, (chunk + 1) * together);
    for (std::int64_t row = chunk * together; row < stop; row += kStrip) {
      const OutputIntegers to = integers_of(args, {args.values, args.multipliers, args.scales}, row);
      quantize_outputs(args, row, smaller(kStrip, stop - row), feedback, wide, to);
    }
  });
}

// Puts 64 integers of an output into its column of a tile: bytes [16 quads][16 outputs][4], or half as many lines of two
// quads each, the first in the lower nibbles.
static inline void put_column(int bits, std::uint8_t* tile, std::int64_t column, const std::int8_t* values) {
  if (bits == 8) {
    for (int quad = 0; quad < 16; ++quad) __builtin_memcpy(tile + quad * 64 + column * 4, values + quad * 4, 4);
    return;
  }
  for (int line = 0; line < 8; ++line) {
    std::uint32_t low, high;
    __builtin_memcpy(&low, values + line * 8, 4);
    __builtin_memcpy(&high, values + line * 8 + 4, 4);
    // q + 8 in a nibble: its highest bit flips.
    const std::uint32_t pair = ((low & 0x0f0f0f0fu) | (high & 0x0f0f0f0fu) << 4) ^ 0x88888888u;
    __builtin_memcpy(tile + line * 64 + column * 4, &pair, 4);
  }
}

static inline void put_output(const PackIntegersArgs& args, std::uint8_t* panel, std::int64_t column,
                              const OutputIntegers& from) {
  const std::int64_t tile_bytes = kTileBytes * args.form.bits / 8;
  for (std::int64_t k = 0; k < args.in_size; k += kTileK, panel += k_tile_bytes(args.form)) {
    std::int8_t values[kTileK] = {};
    __builtin_memcpy(values, from.values + k, static_cast<std::size_t>(smaller(kTileK, args.in_size - k)));
    std::uint8_t* tile = panel + column / 16 * tile_bytes;
    args.form.is_two_level ? put_two_level_column(tile, column % 16, values) : put_column(args.form.bits, tile, column % 16, values);
    if (!args.form.is_two_level) continue;
    const std::int64_t num_groups_here = smaller(2, ceil_div(args.in_size - k, kTwoLevelGroup));
    for (std::int64_t group = 0; group < num_groups_here; ++group)
      panel[2 * kTwoLevelTileBytes + group * 32 + column] = static_cast<std::uint8_t>(from.multipliers[k / kTwoLevelGroup + group]);
  }
}

// Room for 16 outputs while they are quantized.
struct OutputScratch {
  float* wide;
  OutputIntegers integers;
};

static inline OutputScratch make_output_scratch(const PackIntegersArgs& args) {
  const std::int64_t groups = num_groups(args.form, args.in_size);
  const std::int64_t num_multipliers = ceil_div(args.in_size, kTwoLevelGroup);
  const std::int64_t bytes_each = (wide_size(args) + groups) * 4 + args.in_size + num_multipliers;
  float* wide = static_cast<float*>(thread_scratch().bytes(static_cast<std::size_t>(bytes_each * kStrip)));
  float* scales = wide + wide_size(args) * kStrip;
  std::int8_t* values = reinterpret_cast<std::int8_t*>(scales + groups * kStrip);
  return {wide, {values, values + args.in_size * kStrip, scales}};
}

// A strip of 16 outputs of a panel; of a gated one, the second has the ups that belong to the gates of the first.
static inline void pack_integer_strip(const PackIntegersArgs& args, std::int64_t panel, std::int64_t strip, const float* feedback,
                                      const OutputScratch& scratch, std::uint8_t* to) {
  const std::int64_t groups = num_groups(args.form, args.in_size);
  const std::int64_t first = args.is_gated ? panel * kStrip : (panel * 2 + strip) * kStrip;
  const std::int64_t row = args.is_gated ? strip * args.out_size + first : first;
  const std::int64_t count = larger(0, smaller(kStrip, args.out_size - first));
  if (args.weight && count) quantize_outputs(args, row, count, feedback, scratch.wide, scratch.integers);
  for (std::int64_t lane = 0; lane < kStrip; ++lane) {
    const bool is_there = lane < count;
    const OutputIntegers integers = args.weight ? integers_of(args, scratch.integers, lane)
                                                : integers_of(args, {args.values, args.multipliers, args.scales}, row + lane);
    if (is_there) put_output(args, to, strip * kStrip + lane, integers);
    for (std::int64_t group = 0; group < groups; ++group) {
      const std::int64_t at = (panel * groups + group) * 32 + strip * kStrip + lane;
      args.packed_scales[at] = is_there ? integers.scales[group] : 0.0f;
      if (args.packed_offsets) args.packed_offsets[at] = is_there ? args.offsets[(row + lane) * groups + group] : 0.0f;
    }
  }
}

static void pack_integers(const PackIntegersArgs& args, Pool& pool) {
  const std::int64_t num_panels = ceil_div(args.out_size, args.is_gated ? 16 : 32), together = ceil_div(num_panels, 1024);
  const std::int64_t size = panel_bytes(args.form, args.in_size);
  const float* feedback = feedback_of(args, pool);
  pool.run(ceil_div(num_panels, together), [&](std::int64_t chunk) {
    const OutputScratch scratch = make_output_scratch(args);
    for (std::int64_t panel = chunk * together; panel < smaller(num_panels, (chunk + 1) * together); ++panel) {
      std::uint8_t* to = args.packed + panel * size;
      __builtin_memset(to, args.form.bits == 8 || args.form.is_two_level ? 0 : 0x88, static_cast<std::size_t>(size));
      for (std::int64_t strip = 0; strip < 2; ++strip) pack_integer_strip(args, panel, strip, feedback, scratch, to);
    }
  });
}
