// Linear attention by the gated delta rule (Yang et al. 2024, arXiv:2412.06464), token by token.
// Included inside namespace octavo::OCTAVO_LEVEL.
//
// A chunk of work is a key head of a request, with the value heads that share it. It takes some tokens at once: first
// their convolution, then, for some columns of the state at a time, one token after the other: recurrence.inc.h.

// The tokens of one request, and one of its key heads.
struct DeltaWork : RequestTokens {
  const GatedDeltaArgs& args;
  std::int64_t key_head;

  const Element* logged(std::int64_t token) const {
    const std::int64_t size = args.num_channels() + 2 * args.num_value_heads;
    return static_cast<const Element*>(args.log) + (args.rows[request] * args.log_tokens + token) * size;
  }
  // Token number `token` of the request in this step: its channels, and its gates [2 * H].
  const Element* channels(std::int64_t token) const {
    return is_again(token) ? logged(token) : static_cast<const Element*>(args.rows_in) + row(token) * args.row_size();
  }
  const Element* gates(std::int64_t token) const {
    if (is_again(token)) return logged(token) + args.num_channels();
    return static_cast<const Element*>(args.gates) + row(token) * 2 * args.num_value_heads;
  }
};

static inline void runs_of(const GatedDeltaArgs& args, std::int64_t key_head, ChannelRun* runs) {
  const std::int64_t keys = args.num_key_heads * args.key_size, values = args.shared() * args.value_size;
  runs[0] = {key_head * args.key_size, args.key_size};
  runs[1] = {keys + key_head * args.key_size, args.key_size};
  runs[2] = {2 * keys + key_head * values, values};
}

static inline void scale_to_unit(float* x, std::int64_t size, float factor) {
  const float scale = factor / __builtin_sqrtf(dot_product(x, x, size) + 1e-6f);
  for (std::int64_t i = 0; i < size; i += 16) {
    const std::int64_t count = smaller(16, size - i);
    put(x + i, load_some(x + i, count) * scale, count);
  }
}

// Decay and beta of each value head of a token.
static inline void read_gates(const DeltaWork& work, std::int64_t token, float* decay, float* beta) {
  const GatedDeltaArgs& args = work.args;
  const Element* gates = work.gates(token);
  for (std::int64_t i = 0; i < args.shared(); ++i) {
    const std::int64_t head = work.key_head * args.shared() + i;
    const float step = to_float(gates + args.num_value_heads + head) + args.dt_bias[head];
    decay[i] = __builtin_expf(-args.decay_rates[head] * softplus(step));
    beta[i] = 1.0f / (1.0f + __builtin_expf(-to_float(gates + head)));
  }
}

// Normalizes what the tokens of the step read, and applies their gates.
static inline void write_head(const DeltaWork& work, std::int64_t token, const float* read) {
  const GatedDeltaArgs& args = work.args;
  const std::int64_t width = args.value_size, row = work.row(token);
  for (std::int64_t i = 0; i < args.shared(); ++i, read += width) {
    const std::int64_t head = work.key_head * args.shared() + i;
    const Element* gates = static_cast<const Element*>(args.rows_in) + row * args.row_size() + args.num_channels() + head * width;
    Element* out = static_cast<Element*>(args.out) + (row * args.num_value_heads + head) * width;
    const float scale = 1.0f / __builtin_sqrtf(dot_product(read, read, width) / static_cast<float>(width) + args.eps);
    for (std::int64_t j = 0; j < width; j += 16) {
      const std::int64_t count = smaller(16, width - j);
      const f32x16 normed = load_some(read + j, count) * scale * load_some(args.norm + j, count);
      store_some(out + j, normed * silu(load_some(gates + j, count)), count);
    }
  }
}

// Computes a key head of a request: its work's tokens in order.
static void compute_key_head(const DeltaWork& work) {
  const GatedDeltaArgs& args = work.args;
  const std::int64_t past = args.conv_size - 1, num_channels = args.num_channels(), r = args.shared();
  const std::int64_t key_size = args.key_size, values = r * args.value_size, matrix = key_size * args.value_size;
  const StateSizes sizes = {key_size, args.value_size, r};
  ChannelRun runs[3];
  runs_of(args, work.key_head, runs);

  // Scratch: the states of value heads, what tokens have, and the convolution's state.
  const std::int64_t num_floats = r * matrix + DeltaTokens::num_floats(sizes);
  float* states = static_cast<float*>(thread_scratch().bytes(static_cast<std::size_t>(num_floats) * sizeof(float) +
                                                             static_cast<std::size_t>(past * num_channels) * sizeof(Element)));
  DeltaTokens tokens = DeltaTokens::in(states + r * matrix, sizes);
  Element* before = reinterpret_cast<Element*>(states + num_floats);  // [S, C], of which only this head's channels are used

  const std::int64_t begin = args.begins[work.request];
  const Element* conv_state = static_cast<const Element*>(args.conv_states) + begin * past * num_channels;
  for (std::int64_t i = 0; i < past; ++i) {
    for (const ChannelRun& run : runs) {
      const std::size_t bytes = static_cast<std::size_t>(run.size) * sizeof(Element);
      Element* to = before + i * num_channels + run.first;
      if (begin < 0) {
        __builtin_memset(to, 0, bytes);
      } else {
        __builtin_memcpy(to, conv_state + i * num_channels + run.first, bytes);
      }
    }
  }

  const auto row_of = [&](std::int64_t token) {
    return token < 0 ? before + (past + token) * num_channels : work.channels(token);
  };
  const float* latest[kMaxShared];  // of each value head: where its state is; null: zeros
  for (std::int64_t i = 0; i < r; ++i) {
    const std::int64_t head = work.key_head * r + i;
    latest[i] = begin < 0 ? nullptr : args.matrices + (begin * args.num_value_heads + head) * matrix;
  }
  for (std::int64_t first = 0; first < work.num_tokens; first += kTokensAtOnce) {
    const std::int64_t count = smaller(kTokensAtOnce, work.num_tokens - first);
    for (std::int64_t i = 0; i < count; ++i) {
      const Element* rows[kMaxConvTokens + 1];
      for (std::int64_t tap = 0; tap <= past; ++tap) rows[tap] = row_of(first + i - past + tap);
      float* to[3] = {tokens.query + i * key_size, tokens.key + i * key_size, tokens.value + i * values};
      for (int kind = 0; kind < 3; ++kind)
        convolve(args.conv, nullptr, args.conv_size, num_channels, rows, runs[kind], to[kind]);
      scale_to_unit(tokens.query + i * key_size, key_size, 1.0f / __builtin_sqrtf(static_cast<float>(key_size)));
      scale_to_unit(tokens.key + i * key_size, key_size, 1.0f);
      tokens.product[i] = dot_product(tokens.query + i * key_size, tokens.key + i * key_size, key_size);
      read_gates(work, first + i, tokens.decay + i * r, tokens.beta + i * r);
    }
    for (std::int64_t head = 0; head < r; ++head)
      state_tokens<true>(sizes, tokens, args, work, first, count, head, work.key_head * r + head, args.num_value_heads,
                         args.matrices, states + head * matrix, latest[head]);
    for (std::int64_t i = 0; i < count; ++i)
      if (!work.is_again(first + i)) write_head(work, first + i, tokens.read + i * values);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t slot = work.slot(args, first + i);
      if (slot < 0) continue;
      Element* to = static_cast<Element*>(args.conv_states) + slot * past * num_channels;
      for (std::int64_t tap = 0; tap < past; ++tap)
        for (const ChannelRun& run : runs)
          __builtin_memcpy(to + tap * num_channels + run.first, row_of(first + i + 1 - past + tap) + run.first,
                           static_cast<std::size_t>(run.size) * sizeof(Element));
    }
  }
}

// Logs the inputs of a request's drafts, after they were read.
static void log_drafts(const GatedDeltaArgs& args, std::int64_t request) {
  const std::int64_t count = args.num_drafts[request], end = args.query_start_loc[request + 1];
  const std::int64_t channels = args.num_channels(), gates = 2 * args.num_value_heads;
  Element* to = static_cast<Element*>(args.log) + args.rows[request] * args.log_tokens * (channels + gates);
  for (std::int64_t token = end - count; token < end; ++token, to += channels + gates) {
    __builtin_memcpy(to, static_cast<const Element*>(args.rows_in) + token * args.row_size(),
                     static_cast<std::size_t>(channels) * sizeof(Element));
    __builtin_memcpy(to + channels, static_cast<const Element*>(args.gates) + token * gates,
                     static_cast<std::size_t>(gates) * sizeof(Element));
  }
}

static void gated_delta(const GatedDeltaArgs& args, Pool& pool) {
  const InPhase phase(pool.phases(), Phase::states);
  pool.run(args.num_requests * args.num_key_heads, [&](std::int64_t chunk) {
    compute_key_head({RequestTokens::of(args, chunk / args.num_key_heads), args, chunk % args.num_key_heads});
  });
  if (!args.num_drafts) return;
  pool.run(args.num_requests, [&](std::int64_t request) { log_drafts(args, request); });
}

// x times the sigmoid of logits.
static void gate(const GateArgs& args, Pool& pool) {
  const std::int64_t group = larger(1, (std::int64_t{1} << 13) / larger(1, args.size));  // a few microseconds
  pool.run(ceil_div(args.num_rows, group), [&](std::int64_t chunk) {
    for (std::int64_t row = chunk * group; row < smaller(args.num_rows, (chunk + 1) * group); ++row) {
      const Element* x = static_cast<const Element*>(args.x) + row * args.size;
      const Element* logits = static_cast<const Element*>(args.logits) + row * args.stride;
      Element* out = static_cast<Element*>(args.out) + row * args.size;
      for (std::int64_t i = 0; args.together == 1 && i < args.size; i += 16) {
        const std::int64_t count = smaller(16, args.size - i);
        store_some(out + i, swish(load_some(x + i, count), load_some(logits + i, count)), count);
      }
      for (std::int64_t first = 0; args.together > 1 && first < args.size; first += args.together) {
        const f32x16 logit = splat(to_float(logits + first / args.together));
        for (std::int64_t i = 0; i < args.together; i += 16) {
          const std::int64_t count = smaller(16, args.together - i);
          store_some(out + first + i, swish(load_some(x + first + i, count), logit), count);
        }
      }
    }
  });
}
