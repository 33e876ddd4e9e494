// Epilogue: from accumulators to the output. Included inside namespace octavo::OCTAVO_LEVEL.

#if defined(OCTAVO_FLOAT32)
#include "float32_store.inc.h"
#else

// Stores 64 results of a row in the left tiles of the next linear.
template <class Half>
[[gnu::noinline, gnu::cold]] static void put_left_pair(const Destination& to, std::int64_t row, std::int64_t pair, const Half* lines) {
  for (std::int64_t i = 0; i < 2 && pair * 2 + i < ceil_div(to.out_size, 32); ++i)
    put_left(to.left_line(row, pair * 2 + i), lines + i * 32);
}

// Stores 32 gates of a row and their ups.
template <class Half>
[[gnu::noinline, gnu::cold]] static void store_gates_and_ups(const Destination& to, std::int64_t row, std::int64_t pair,
                                                             const f32x16* values, std::int64_t count) {
  Half* out = static_cast<Half*>(to.out) + row * 2 * to.out_size + pair * 32;
  const u16x32 lines[2] = {narrow_both(Half{}, values[0], values[2]), narrow_both(Half{}, values[1], values[3])};
  for (int i = 0; i < 2; ++i) __builtin_memcpy(out + i * to.out_size, &lines[i], static_cast<std::size_t>(count) * sizeof(Half));
}

// Stores one row's results of a pair of panels [2][2][16], bias added, in 16 bits unless the output is float32.
template <class Half>
[[gnu::always_inline]] static inline void store_halves(const Destination& to, std::int64_t row, std::int64_t pair,
                                                       const f32x16* values, bool streams) {
  const std::int64_t width = to.outputs_per_panel() * kPair, column = pair * width;
  const std::int64_t count = smaller(width, to.out_size - column);
  if (to.output == Output::float32) {
    float* out = static_cast<float*>(to.out) + row * to.out_size + column;
    if (streams && count == 64 && reinterpret_cast<std::uintptr_t>(out) % 64 == 0) {
      for (int i = 0; i < 4; ++i) stream_line(out + i * 16, (u16x32)values[i]);
      return;
    }
    alignas(64) float lanes[64];
    for (int i = 0; i < 4; ++i) store_f32(lanes + i * 16, values[i]);
    __builtin_memcpy(out, lanes, static_cast<std::size_t>(count) * sizeof(float));
    return;
  }
  constexpr Half half = {};
  u16x32 lines[2];
  if (to.output == Output::gated) {
    // Rounded where a separate op would read rounded values.
    const auto joined = [&](int i) { return gated(to.activation, rounded(half, values[i]), rounded(half, values[i + 1])); };
    lines[0] = narrow_both(half, joined(0), joined(2));
  } else if (to.output == Output::ungated) {
    const auto active = [&](int i) { return ungated(to.activation, rounded(half, values[i])); };
    lines[0] = narrow_both(half, active(0), active(1)), lines[1] = narrow_both(half, active(2), active(3));
    if constexpr (std::is_same_v<Half, Element>)
      if (to.out_left) return put_left_pair(to, row, pair, reinterpret_cast<const Half*>(lines));
  } else if (to.output == Output::gates_and_ups) {
    return store_gates_and_ups<Half>(to, row, pair, values, count);
  } else {
    lines[0] = narrow_both(half, values[0], values[1]), lines[1] = narrow_both(half, values[2], values[3]);
  }
  if constexpr (std::is_same_v<Half, Element>)
    if (to.out_left) return put_left(to.left_line(row, pair), reinterpret_cast<const Half*>(lines));
  Half* out = static_cast<Half*>(to.out) + row * to.out_size + column;
  if (streams && count == width && reinterpret_cast<std::uintptr_t>(out) % 64 == 0) {
    for (std::int64_t i = 0; i < width; i += 32) stream_line(out + i, lines[i / 32]);
  } else if (count == width) {
    for (std::int64_t i = 0; i < width; i += 32) store(out + i, lines[i / 32]);
  } else {
    __builtin_memcpy(out, lines, static_cast<std::size_t>(count) * sizeof(Half));
  }
}

#if !defined(OCTAVO_DENSE)

// Results of integers with float16 activations. Not inlined: where bf16 is stored, in many places, it costs a test.
[[gnu::noinline]] static void store_float16(const Destination& to, std::int64_t row, std::int64_t pair, const f32x16* values,
                                            bool streams) {
  store_halves<f16>(to, row, pair, values, streams);
}

#endif

[[gnu::always_inline]] static inline void store_row(const Destination& to, std::int64_t row, std::int64_t pair,
                                                    const f32x16* values, bool streams) {
#if !defined(OCTAVO_DENSE)
  if (to.is_float16) return store_float16(to, row, pair, values, streams);
#endif
  store_halves<Element>(to, row, pair, values, streams);
}

#endif

// Epilogue of one row's results of a pair of panels.
[[gnu::always_inline]] static inline void put_results(const Destination& to, std::int64_t row, std::int64_t pair,
                                                      const f32x16* values, bool streams) {
  to.leaders ? to.leaders[row].meet(values, pair * 64, to.out_size) : store_row(to, row, pair, values, streams);
}

// Rows with complete sums, waiting for their epilogue. It is interleaved with the products of the next panels, so that
// vector and matrix units work at the same time.
template <class Panels>
struct Finish {
  Panels of;
  std::int64_t row = 0, end = 0;
  std::int64_t num_steps = 0;  // left until all rows are stored
  std::int64_t credit = 0;

  void do_all() {
    while (row < end) of.put_row(row++);
  }
  // One step's share.
  void do_some(std::int64_t num_rows) {
    for (credit += num_rows; credit >= num_steps && row < end; credit -= num_steps) of.put_row(row++);
  }
};

// Accumulators of a pair of panels, or of a single last one.
struct FinishedPanels {
  const Product* product;
  const float* results;  // [2][row tiles first ...][2][16][16]
  std::int64_t panel_results, first, panel, num_panels;
  bool streams;

  void put_row(std::int64_t row) const {
    const float* of_row = results + (row / 16 - first) * 2 * kResultElements + row % 16 * 16;
    const float* bias = product->packed.bias;
    f32x16 values[4] = {};
    const auto take_panel = [&](std::int64_t i) {
      values[i * 2] = load_f32(of_row + i * panel_results);
      values[i * 2 + 1] = load_f32(of_row + i * panel_results + kResultElements);
      if (!bias) return;
      values[i * 2] += load_f32(bias + panel * 32 + i * 32);
      values[i * 2 + 1] += load_f32(bias + panel * 32 + i * 32 + 16);
    };
    take_panel(0);  // unrolled by hand: a generic loop would keep them in memory
    if (num_panels == kPair) take_panel(1);
    put_results(product->to, row, panel / kPair, values, streams);
  }
};
