// Expands chunks of weights in blocks to bytes and float32 scales. Included inside namespace octavo::OCTAVO_LEVEL.

constexpr std::int64_t kGroupBytes = kBlockGroup * kStripOutputs;

// An expanded chunk of a panel: codes of each strip [groups][8 quads][16 outputs][4] with the type's bias added, and
// scales of all 32 outputs for each group and each half of it.
struct ExpandedChunk {
  alignas(64) std::uint8_t room[2][kChunkGroups * kGroupBytes];
  const std::uint8_t* values[2];  // `room`, or the weight itself
  alignas(64) float scales[kChunkGroups][2][32];
  alignas(64) float offsets[kChunkGroups][2][32];
};

template <class Of, int... kQuad>
[[gnu::always_inline]] static inline void expand_group(const std::uint8_t* planes, std::uint8_t* to, Numbers<kQuad...>) {
  (store(to + kQuad * 64, biased_codes<Of, bias_of(Of::traits), kQuad>(planes)), ...);
}

// The codes of a strip; those of 8 bits that need no bias stay where they are.
template <class Of>
static inline void expand_codes(const std::uint8_t* from, std::int64_t num_groups, int strip, ExpandedChunk& to) {
  std::uint8_t* values = to.room[strip];
  to.values[strip] = values;
  if constexpr (Of::traits.bits == 8 && bias_of(Of::traits) == Of::traits.zero) return void(to.values[strip] = from);
  for (std::int64_t group = 0; group < num_groups; ++group, from += Of::traits.group_bytes(), values += kGroupBytes) {
    for (std::int64_t line = 0; line < Of::traits.group_bytes(); line += 64) prefetch_near(from + line);
    expand_group<Of>(from, values, Numbers<0, 1, 2, 3, 4, 5, 6, 7>{});
  }
}

// A strip of a chunk. Offsets are zeros where only the panel's other strip has some.
template <class Of>
static inline void expand_strip(const BlockPanel& panel, std::int64_t index, int strip, ExpandedChunk& to) {
  const std::int64_t num_groups = panel.groups_of(index), num_subs = panel.num_subs();
  const std::uint8_t* from = panel.chunk(index, strip);
  expand_codes<Of>(from, num_groups, strip, to);
  const ScalesOfStrip<Of> scales(from + num_groups * Of::traits.group_bytes(), num_groups, panel.span);
  const bool has_offsets = panel.has_offsets();
  for (std::int64_t group = 0; group < num_groups; ++group)
    for (int half = 0; half < num_subs; ++half) {
      store_f32(&to.scales[group][half][strip * 16], scales.scale(group, half));
      if constexpr (Of::traits.has_offsets) {
        store_f32(&to.offsets[group][half][strip * 16], scales.offset(group, half));
      } else if (has_offsets) {
        store_f32(&to.offsets[group][half][strip * 16], splat(0.0f));
      }
    }
}
