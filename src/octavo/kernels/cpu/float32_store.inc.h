// Stores the results of float32 linears. Included from linear.inc.h.

// Stores `kCount` values, clipped to the output: as non-temporal whole cache lines if they `stream`.
template <std::int64_t kCount>
[[gnu::always_inline]] static inline void store_values(float* out, const f32x16* values, std::int64_t count, bool streams) {
  if (count < kCount) return (void)__builtin_memcpy(out, values, static_cast<std::size_t>(count) * sizeof(float));
  streams = streams && reinterpret_cast<std::uintptr_t>(out) % 64 == 0;
  for (int i = 0; i < kCount / 16; ++i) streams ? stream_line(out + i * 16, (u16x32)values[i]) : store_f32(out + i * 16, values[i]);
}

// Stores 64 results of a row, an activation without a gate applied, in the output or in the left tiles of the next
// linear.
[[gnu::noinline, gnu::cold]] static void store_ungated(const Destination& to, std::int64_t row, std::int64_t pair,
                                                       const f32x16* values, std::int64_t count) {
  f32x16 of[4];
  for (int i = 0; i < 4; ++i) of[i] = ungated(to.activation, values[i]);
  if (!to.out_left) return store_values<64>(static_cast<float*>(to.out) + row * to.out_size + pair * 64, of, count, false);
  for (std::int64_t i = 0; i < 2 && pair * 2 + i < ceil_div(to.out_size, 32); ++i)
    store_values<32>(to.left_line(row, pair * 2 + i), of + i * 2, 32, false);
}

// Stores 32 gates of a row and their ups.
[[gnu::noinline, gnu::cold]] static void store_gates_and_ups(const Destination& to, std::int64_t row, std::int64_t pair,
                                                             const f32x16* values, std::int64_t count) {
  float* out = static_cast<float*>(to.out) + row * 2 * to.out_size + pair * 32;
  const f32x16 gates[2] = {values[0], values[2]}, ups[2] = {values[1], values[3]};
  store_values<32>(out, gates, count, false);
  store_values<32>(out + to.out_size, ups, count, false);
}

// Stores one row's results of a pair of panels [2][2][16], bias added.
static inline void store_row(const Destination& to, std::int64_t row, std::int64_t pair, const f32x16* values,
                             bool streams) {
  const std::int64_t width = to.outputs_per_panel() * kPair, column = pair * width;
  const std::int64_t count = smaller(width, to.out_size - column);
  float* out = static_cast<float*>(to.out) + row * to.out_size + column;
  if (to.output == Output::ungated) return store_ungated(to, row, pair, values, count);
  if (to.output == Output::gates_and_ups) return store_gates_and_ups(to, row, pair, values, count);
  if (to.output != Output::gated) return store_values<64>(out, values, count, streams);
  const f32x16 joined[2] = {gated(to.activation, values[0], values[1]), gated(to.activation, values[2], values[3])};
  to.out_left ? store_values<32>(to.left_line(row, pair), joined, 32, false) : store_values<32>(out, joined, count, streams);
}
