// A short convolution between two gates. Included inside namespace octavo::OCTAVO_LEVEL.
//
// A chunk of work is a block of channels of a request, so that its state may be overwritten in place: what it was is read
// first. Inputs are rounded as the state holds them, so it does not matter where a step ends.

constexpr std::int64_t kConvChannels = 256;
constexpr std::int64_t kConvTokensAtOnce = 16;

struct ConvWork : RequestTokens {
  const ShortConvArgs& args;
  std::int64_t channel, width;  // the first channel, and how many

  Element* logged(std::int64_t draft) const {
    const std::int64_t row = args.rows[request] * args.log_tokens + draft;
    return static_cast<Element*>(args.log) + row * args.num_channels + channel;
  }
  Element* state(std::int64_t slot) const {
    return static_cast<Element*>(args.conv_states) + slot * (args.conv_size - 1) * args.num_channels + channel;
  }
};

// Writes what the convolution sees of a token of the step.
static inline void read_conv_input(const ConvWork& work, std::int64_t row, Element* to) {
  const std::int64_t num_channels = work.args.num_channels;
  const Element* gates = static_cast<const Element*>(work.args.rows_in) + row * 3 * num_channels + work.channel;
  const Element* values = gates + 2 * num_channels;
  for (std::int64_t i = 0; i < work.width; i += 16) {
    const std::int64_t count = smaller(16, work.width - i);
    store_some(to + i, load_some(gates + i, count) * load_some(values + i, count), count);
  }
}

static void convolve_channels(const ConvWork& work) {
  const ShortConvArgs& args = work.args;
  const std::int64_t past = args.conv_size - 1, num_channels = args.num_channels;
  const std::size_t bytes = static_cast<std::size_t>(work.width) * sizeof(Element);
  // What tokens have as inputs: those before, then some at once.
  Element* window = static_cast<Element*>(
      thread_scratch().bytes(static_cast<std::size_t>((past + kConvTokensAtOnce) * kConvChannels) * sizeof(Element)));
  const std::int64_t begin = args.begins[work.request];
  for (std::int64_t i = 0; i < past; ++i) {
    Element* to = window + i * kConvChannels;
    begin < 0 ? __builtin_memset(to, 0, bytes) : __builtin_memcpy(to, work.state(begin) + i * num_channels, bytes);
  }
  for (std::int64_t first = 0; first < work.num_tokens; first += kConvTokensAtOnce) {
    const std::int64_t count = smaller(kConvTokensAtOnce, work.num_tokens - first);
    for (std::int64_t i = 0; i < count; ++i) {
      Element* to = window + (past + i) * kConvChannels;
      if (work.is_again(first + i))
        __builtin_memcpy(to, work.logged(first + i), bytes);
      else
        read_conv_input(work, work.row(first + i), to);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      if (work.is_again(first + i)) continue;
      const std::int64_t row = work.row(first + i);
      const Element* rows[kMaxConvTokens + 1];
      for (std::int64_t tap = 0; tap <= past; ++tap) rows[tap] = window + (i + tap) * kConvChannels;
      const Element* gates = static_cast<const Element*>(args.rows_in) + (3 * row + 1) * num_channels + work.channel;
      Element* out = static_cast<Element*>(args.out) + row * num_channels + work.channel;
      const float* conv = args.conv + work.channel;
      const float* bias = args.bias ? args.bias + work.channel : nullptr;
      for (std::int64_t j = 0; j < work.width; j += 16) {
        const std::int64_t size = smaller(16, work.width - j);
        const f32x16 sum = convolved(conv, bias, args.conv_size, num_channels, rows, j, size);
        store_some(out + j, sum * load_some(gates + j, size), size);
      }
      if (const std::int64_t slot = args.slots[row]; slot >= 0)
        for (std::int64_t tap = 0; tap < past; ++tap)
          __builtin_memcpy(work.state(slot) + tap * num_channels, rows[tap + 1], bytes);
      if (const std::int64_t draft = first + i - (work.num_tokens - work.num_drafts); draft >= 0)
        __builtin_memcpy(work.logged(draft), rows[past], bytes);
    }
    __builtin_memmove(window, window + count * kConvChannels, static_cast<std::size_t>(past * kConvChannels) * sizeof(Element));
  }
}

static void short_conv(const ShortConvArgs& args, Pool& pool) {
  const InPhase phase(pool.phases(), Phase::states);
  const std::int64_t blocks = ceil_div(args.num_channels, kConvChannels);
  pool.run(args.num_requests * blocks, [&](std::int64_t chunk) {
    const std::int64_t channel = chunk % blocks * kConvChannels, width = smaller(kConvChannels, args.num_channels - channel);
    convolve_channels({RequestTokens::of(args, chunk / blocks), args, channel, width});
  });
}
