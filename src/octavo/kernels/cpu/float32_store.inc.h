// Where float32 maps' results go. Included from linear.inc.h.

// `kCount` values, or those of them that are there: whole cache lines past the caches, where they `stream`.
template <std::int64_t kCount>
[[gnu::always_inline]] static inline void store_values(float* out, const f32x16* values, std::int64_t count, bool streams) {
  if (count < kCount) return (void)__builtin_memcpy(out, values, static_cast<std::size_t>(count) * sizeof(float));
  streams = streams && reinterpret_cast<std::uintptr_t>(out) % 64 == 0;
  for (int i = 0; i < kCount / 16; ++i) streams ? stream_line(out + i * 16, (u16x32)values[i]) : store_f32(out + i * 16, values[i]);
}

// One row's results of a pair of panels [2][2][16], biases added: to where they belong in the output.
static inline void store_row(const Destination& to, std::int64_t row, std::int64_t pair, const f32x16* values,
                             bool streams) {
  const std::int64_t width = to.outputs_per_panel() * kPair, column = pair * width;
  const std::int64_t count = smaller(width, to.out_size - column);
  float* out = static_cast<float*>(to.out) + row * to.out_size + column;
  if (to.output != Output::gated) return store_values<64>(out, values, count, streams);
  const f32x16 joined[2] = {silu(values[0]) * values[1], silu(values[2]) * values[3]};
  to.out_left ? store_values<32>(to.left_line(row, pair), joined, 32, false) : store_values<32>(out, joined, count, streams);
}
