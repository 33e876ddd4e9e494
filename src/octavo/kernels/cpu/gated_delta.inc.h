// Linear attention by the gated delta rule (Yang et al. 2024, arXiv:2412.06464), token by token.
// Included inside namespace octavo::OCTAVO_LEVEL.
//
// A chunk of work is a key head of a request, with the value heads that share it. It takes some tokens at once: first
// their convolution, then, for some columns of the state at a time, one token after the other. A token's change of the
// state and what the next one reads of it are one pass: a row of the state is loaded and stored once per token.
// Everything that is summed is summed in one order, so it does not matter where a state was stored in between.

constexpr std::int64_t kTokensAtOnce = 16;
constexpr int kStateRegisters = 4;  // of a row of the state

// What some tokens of one key head have after the convolution.
struct DeltaTokens {
  float *query, *key, *value, *read;  // [tokens][K], [tokens][K], [tokens][r * V], [tokens][r * V]
  float product[kTokensAtOnce];       // of query and key
  float *decay, *beta;                // [tokens][r]
};

// The state of one value head while a request is computed: where it was after the last token, and where it goes.
struct StateSpan {
  const float* from[kTokensAtOnce];  // before each token; null: zeros
  float* to[kTokensAtOnce];          // after it; null: nobody reads it
};

// A register of a row of the state, or the first `rest` columns of one.
template <bool kIsPart>
static inline Register load_columns(const float* from, std::int64_t rest) {
  if constexpr (!kIsPart) return load<Register>(from);
  Register result = {};
  __builtin_memcpy(&result, from, static_cast<std::size_t>(rest) * sizeof(float));
  return result;
}

template <bool kIsPart>
static inline void store_columns(float* to, Register value, std::int64_t rest) {
  if constexpr (!kIsPart) return store(to, value);
  __builtin_memcpy(to, &value, static_cast<std::size_t>(rest) * sizeof(float));
}

// For `kCount` registers of columns from `column` on: what the tokens read, and the states after them.
template <int kCount, bool kIsPart>
static inline void delta_columns(const GatedDeltaArgs& args, const DeltaTokens& tokens, const StateSpan& span,
                                 std::int64_t num_tokens, std::int64_t head, std::int64_t column) {
  const std::int64_t size = args.key_size, width = args.value_size, r = args.shared(), row = r * width;
  const std::int64_t at = head * width + column, rest = width - column;
  Register by_key[kCount] = {}, by_query[kCount] = {};
  if (span.from[0]) {
    const float *state = span.from[0] + column, *key = tokens.key, *query = tokens.query;
    for (std::int64_t k = 0; k < size; ++k, state += width) {
      for (int i = 0; i < kCount; ++i) {
        const Register values = load_columns<kIsPart>(state + i * kLanes, rest);
        by_key[i] = values * key[k] + by_key[i];
        by_query[i] = values * query[k] + by_query[i];
      }
    }
  }
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const float decay = tokens.decay[token * r + head], beta = tokens.beta[token * r + head];
    Register change[kCount];
    for (int i = 0; i < kCount; ++i) {
      const Register value = load_columns<kIsPart>(tokens.value + token * row + at + i * kLanes, rest);
      change[i] = (value - by_key[i] * decay) * beta;
      const Register read = change[i] * tokens.product[token] + by_query[i] * decay;
      store_columns<kIsPart>(tokens.read + token * row + at + i * kLanes, read, rest);
      by_key[i] = by_query[i] = Register{};
    }
    float* to = span.to[token];
    if (!to) continue;
    const float *from = span.from[token], *key = tokens.key + token * size;
    to += column;
    // Of the last token the next one's products are computed, too, with its own key and query: one loop for both, as in
    // two a compiler might round sums differently.
    const bool goes_on = token + 1 < num_tokens;
    const float* next_key = goes_on ? key + size : key;
    const float* next_query = tokens.query + (goes_on ? token + 1 : token) * size;
    const auto update = [&](auto is_first) {
      const float* old = from + (is_first.value ? 0 : column);
      for (std::int64_t k = 0; k < size; ++k, to += width) {
        for (int i = 0; i < kCount; ++i) {
          Register values = change[i] * key[k];
          if constexpr (!decltype(is_first)::value)
            values = load_columns<kIsPart>(old + k * width + i * kLanes, rest) * decay + values;
          store_columns<kIsPart>(to + i * kLanes, values, rest);
          by_key[i] = values * next_key[k] + by_key[i];
          by_query[i] = values * next_query[k] + by_query[i];
        }
      }
    };
    from ? update(Constant<0>{}) : update(Constant<1>{});
  }
}

static inline void delta_head(const GatedDeltaArgs& args, const DeltaTokens& tokens, const StateSpan& span,
                              std::int64_t num_tokens, std::int64_t head) {
  const std::int64_t width = args.value_size;
  std::int64_t column = 0;
  for (; column + kStateRegisters * kLanes <= width; column += kStateRegisters * kLanes)
    delta_columns<kStateRegisters, false>(args, tokens, span, num_tokens, head, column);
  for (; column + kLanes <= width; column += kLanes)
    delta_columns<1, false>(args, tokens, span, num_tokens, head, column);
  if (column < width) delta_columns<1, true>(args, tokens, span, num_tokens, head, column);
}

// The tokens of one request, and one of its key heads.
struct DeltaWork {
  const GatedDeltaArgs& args;
  std::int64_t request, key_head;
  std::int64_t first_token, num_again, num_tokens;  // in T; from the log, before them; of both

  std::int64_t slot(std::int64_t token) const {
    return token < num_again ? -1 : args.slots[first_token + token - num_again];
  }
  const Element* logged(std::int64_t token) const {
    const std::int64_t size = args.num_channels() + 2 * args.num_value_heads;
    return static_cast<const Element*>(args.log) + (args.StateStep::rows[request] * args.log_tokens + token) * size;
  }
  // Token number `token` of the request in this step: its channels, and its gates [2 * H].
  const Element* channels(std::int64_t token) const {
    if (token < num_again) return logged(token);
    return static_cast<const Element*>(args.rows_in) + (first_token + token - num_again) * args.row_size();
  }
  const Element* gates(std::int64_t token) const {
    if (token < num_again) return logged(token) + args.num_channels();
    return static_cast<const Element*>(args.gates) + (first_token + token - num_again) * 2 * args.num_value_heads;
  }
};

// The channels of one kind that belong to a key head: queries, keys, or the values of its value heads.
struct ChannelRun {
  std::int64_t first, size;
};

static inline void runs_of(const GatedDeltaArgs& args, std::int64_t key_head, ChannelRun* runs) {
  const std::int64_t keys = args.num_key_heads * args.key_size, values = args.shared() * args.value_size;
  runs[0] = {key_head * args.key_size, args.key_size};
  runs[1] = {keys + key_head * args.key_size, args.key_size};
  runs[2] = {2 * keys + key_head * values, values};
}

// Writes `count` numbers, mostly 16.
static inline void put(float* to, f32x16 value, std::int64_t count) {
  count == 16 ? store_whole(to, value) : store_part(to, value, count);
}

// Convolves some channels of a token; rows[0] is the earliest that it sees.
static inline void convolve(const GatedDeltaArgs& args, const Element* const* rows, ChannelRun run, float* out) {
  const std::int64_t num_channels = args.num_channels();
  for (std::int64_t i = 0; i < run.size; i += 16) {
    const std::int64_t count = smaller(16, run.size - i), channel = run.first + i;
    f32x16 sum = load_some(rows[0] + channel, count) * load_some(args.conv + channel, count);
    for (std::int64_t tap = 1; tap < args.conv_size; ++tap)
      sum = load_some(rows[tap] + channel, count) * load_some(args.conv + tap * num_channels + channel, count) + sum;
    put(out + i, silu(sum), count);
  }
}

static inline float dot_product(const float* a, const float* b, std::int64_t size) {
  f32x16 sum = splat(0.0f);
  for (std::int64_t i = 0; i < size; i += 16) {
    const std::int64_t count = smaller(16, size - i);
    sum = load_some(a + i, count) * load_some(b + i, count) + sum;
  }
  return sum_of_lanes(sum);
}

static inline void scale_to_unit(float* x, std::int64_t size, float factor) {
  const float scale = factor / __builtin_sqrtf(dot_product(x, x, size) + 1e-6f);
  for (std::int64_t i = 0; i < size; i += 16) {
    const std::int64_t count = smaller(16, size - i);
    put(x + i, load_some(x + i, count) * scale, count);
  }
}

static inline float to_float(const Element* from) { return load_part(from, 1)[0]; }

// Decay and beta of each value head of a token.
static inline void read_gates(const DeltaWork& work, std::int64_t token, float* decay, float* beta) {
  const GatedDeltaArgs& args = work.args;
  const Element* gates = work.gates(token);
  for (std::int64_t i = 0; i < args.shared(); ++i) {
    const std::int64_t head = work.key_head * args.shared() + i;
    const float step = to_float(gates + args.num_value_heads + head) + args.dt_bias[head];
    const float softplus = step > 20.0f ? step : __builtin_log1pf(__builtin_expf(step));
    decay[i] = __builtin_expf(-args.decay_rates[head] * softplus);
    beta[i] = 1.0f / (1.0f + __builtin_expf(-to_float(gates + head)));
  }
}

// Normalizes what the tokens of the step read, and applies their gates.
static inline void write_head(const DeltaWork& work, std::int64_t token, const float* read) {
  const GatedDeltaArgs& args = work.args;
  const std::int64_t width = args.value_size, row = work.first_token + token - work.num_again;
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
  ChannelRun runs[3];
  runs_of(args, work.key_head, runs);

  // Scratch: the states of value heads, what tokens have, and the convolution's state.
  const std::int64_t per_token = 2 * key_size + 2 * values + 2 * r;
  const std::size_t num_floats = static_cast<std::size_t>(r * matrix + kTokensAtOnce * per_token);
  float* floats = static_cast<float*>(
      thread_scratch().bytes(num_floats * sizeof(float) + static_cast<std::size_t>(past * num_channels) * sizeof(Element)));
  float* states = floats;
  floats += r * matrix;
  DeltaTokens tokens;
  tokens.query = floats, floats += kTokensAtOnce * key_size;
  tokens.key = floats, floats += kTokensAtOnce * key_size;
  tokens.value = floats, floats += kTokensAtOnce * values;
  tokens.read = floats, floats += kTokensAtOnce * values;
  tokens.decay = floats, floats += kTokensAtOnce * r;
  tokens.beta = floats, floats += kTokensAtOnce * r;
  Element* before = reinterpret_cast<Element*>(floats);  // [S, C], of which only this head's channels are used

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
      convolve(args, rows, runs[0], tokens.query + i * key_size);
      convolve(args, rows, runs[1], tokens.key + i * key_size);
      convolve(args, rows, runs[2], tokens.value + i * values);
      scale_to_unit(tokens.query + i * key_size, key_size, 1.0f / __builtin_sqrtf(static_cast<float>(key_size)));
      scale_to_unit(tokens.key + i * key_size, key_size, 1.0f);
      tokens.product[i] = dot_product(tokens.query + i * key_size, tokens.key + i * key_size, key_size);
      read_gates(work, first + i, tokens.decay + i * r, tokens.beta + i * r);
    }
    for (std::int64_t head = 0; head < r; ++head) {
      StateSpan span;
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t slot = work.slot(first + i);
        span.from[i] = latest[head];
        if (slot >= 0) {
          span.to[i] = args.matrices + (slot * args.num_value_heads + work.key_head * r + head) * matrix;
        } else {
          span.to[i] = first + i + 1 < work.num_tokens ? states + head * matrix : nullptr;
        }
        latest[head] = span.to[i];
      }
      delta_head(args, tokens, span, count, head);
    }
    for (std::int64_t i = 0; i < count; ++i)
      if (first + i >= work.num_again) write_head(work, first + i, tokens.read + i * values);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t slot = work.slot(first + i);
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
  const std::int64_t count = args.num_drafts ? args.num_drafts[request] : 0, end = args.query_start_loc[request + 1];
  const std::int64_t channels = args.num_channels(), gates = 2 * args.num_value_heads;
  Element* to = static_cast<Element*>(args.log) + args.StateStep::rows[request] * args.log_tokens * (channels + gates);
  for (std::int64_t token = end - count; token < end; ++token, to += channels + gates) {
    __builtin_memcpy(to, static_cast<const Element*>(args.rows_in) + token * args.row_size(),
                     static_cast<std::size_t>(channels) * sizeof(Element));
    __builtin_memcpy(to + channels, static_cast<const Element*>(args.gates) + token * gates,
                     static_cast<std::size_t>(gates) * sizeof(Element));
  }
}

static void gated_delta(const GatedDeltaArgs& args, Pool& pool) {
  pool.run(args.num_requests * args.num_key_heads, [&](std::int64_t chunk) {
    const std::int64_t request = chunk / args.num_key_heads, first = args.query_start_loc[request];
    const std::int64_t again = args.num_replayed ? args.num_replayed[request] : 0;
    compute_key_head({args, request, chunk % args.num_key_heads, first, again,
                      again + args.query_start_loc[request + 1] - first});
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
      for (std::int64_t i = 0; i < args.size; i += 16) {
        const std::int64_t count = smaller(16, args.size - i);
        store_some(out + i, swish(load_some(x + i, count), load_some(logits + i, count)), count);
      }
    }
  });
}
