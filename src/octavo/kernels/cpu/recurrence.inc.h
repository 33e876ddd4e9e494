// States of heads, token by token: a matrix that forgets a part, takes a value under a key, and is read by a query; and
// the convolution before it. Included inside namespace octavo::OCTAVO_LEVEL.
//
// A token's change of the state and what the next one reads of it are one pass: a row of the state is loaded and stored
// once per token. Everything that is summed is summed in one order, so it does not matter where a state was stored in
// between.

// The tokens of one request in a step: those from the log, which are computed again, then its own.
struct RequestTokens {
  std::int64_t request, first, num_again, num_tokens, num_drafts;  // first in T; of both; the last ones, which are logged

  static RequestTokens of(const StateStep& step, std::int64_t request) {
    const std::int64_t first = step.query_start_loc[request], end = step.query_start_loc[request + 1];
    const std::int64_t again = step.num_replayed ? step.num_replayed[request] : 0;
    return {request, first, again, again + end - first, step.num_drafts ? step.num_drafts[request] : 0};
  }
  bool is_again(std::int64_t token) const { return token < num_again; }
  std::int64_t row(std::int64_t token) const { return first + token - num_again; }  // in T
  std::int64_t slot(const StateStep& step, std::int64_t token) const { return is_again(token) ? -1 : step.slots[row(token)]; }
};

constexpr std::int64_t kTokensAtOnce = 16;
constexpr int kStateRegisters = 4;  // of a row of the state

// Of heads that share keys and queries, r of them.
struct StateSizes {
  std::int64_t key_size, value_size, num_heads;  // K, V, r
};

// What some tokens of such heads have after the convolution.
struct DeltaTokens {
  float *query, *key, *value, *read;  // [tokens][K], [tokens][K], [tokens][r * V], [tokens][r * V]
  float product[kTokensAtOnce];       // of query and key
  float *decay, *beta;                // [tokens][r]

  static std::int64_t num_floats(const StateSizes& sizes) {
    return kTokensAtOnce * 2 * (sizes.key_size + sizes.num_heads * sizes.value_size + sizes.num_heads);
  }
  // Divides that many floats.
  static DeltaTokens in(float* floats, const StateSizes& sizes) {
    const std::int64_t keys = kTokensAtOnce * sizes.key_size, heads = kTokensAtOnce * sizes.num_heads;
    const std::int64_t values = heads * sizes.value_size;
    float *value = floats + 2 * keys, *decay = value + 2 * values;
    return {floats, floats + keys, value, value + values, {}, decay, decay + heads};
  }
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

// For `kCount` registers of columns from `column` on: what the tokens read, and the states after them. By the delta rule
// a value is moved by how far it is from the one that the state has for its key.
template <bool kIsDelta, int kCount, bool kIsPart>
static inline void state_columns(const StateSizes& sizes, const DeltaTokens& tokens, const StateSpan& span,
                                 std::int64_t num_tokens, std::int64_t head, std::int64_t column) {
  const std::int64_t size = sizes.key_size, width = sizes.value_size, r = sizes.num_heads, row = r * width;
  const std::int64_t at = head * width + column, rest = width - column;
  Register by_key[kCount] = {}, by_query[kCount] = {};
  if (span.from[0]) {
    const float *state = span.from[0] + column, *key = tokens.key, *query = tokens.query;
    for (std::int64_t k = 0; k < size; ++k, state += width) {
      for (int i = 0; i < kCount; ++i) {
        const Register values = load_columns<kIsPart>(state + i * kLanes, rest);
        if constexpr (kIsDelta) by_key[i] = values * key[k] + by_key[i];
        by_query[i] = values * query[k] + by_query[i];
      }
    }
  }
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const float decay = tokens.decay[token * r + head], beta = tokens.beta[token * r + head];
    Register change[kCount];
    for (int i = 0; i < kCount; ++i) {
      const Register value = load_columns<kIsPart>(tokens.value + token * row + at + i * kLanes, rest);
      if constexpr (kIsDelta)
        change[i] = (value - by_key[i] * decay) * beta;
      else
        change[i] = value * beta;
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
          if constexpr (kIsDelta) by_key[i] = values * next_key[k] + by_key[i];
          by_query[i] = values * next_query[k] + by_query[i];
        }
      }
    };
    from ? update(Constant<0>{}) : update(Constant<1>{});
  }
}

// All columns of one head; by the delta rule or without it.
template <bool kIsDelta>
static inline void state_head(const StateSizes& sizes, const DeltaTokens& tokens, const StateSpan& span,
                              std::int64_t num_tokens, std::int64_t head) {
  const std::int64_t width = sizes.value_size;
  std::int64_t column = 0;
  for (; column + kStateRegisters * kLanes <= width; column += kStateRegisters * kLanes)
    state_columns<kIsDelta, kStateRegisters, false>(sizes, tokens, span, num_tokens, head, column);
  for (; column + kLanes <= width; column += kLanes)
    state_columns<kIsDelta, 1, false>(sizes, tokens, span, num_tokens, head, column);
  if (column < width) state_columns<kIsDelta, 1, true>(sizes, tokens, span, num_tokens, head, column);
}

// Some tokens of one head of `num_heads_in_all`: its states, of K * V numbers, are at `matrices`, and where no slot is,
// at `scratch`. `latest` is where the state is: after these tokens, too.
template <bool kIsDelta>
static inline void state_tokens(const StateSizes& sizes, const DeltaTokens& tokens, const StateStep& step,
                                const RequestTokens& request, std::int64_t first, std::int64_t count, std::int64_t head,
                                std::int64_t head_in_all, std::int64_t num_heads_in_all, float* matrices, float* scratch,
                                const float*& latest) {
  const std::int64_t matrix = sizes.key_size * sizes.value_size;
  StateSpan span;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t slot = request.slot(step, first + i);
    span.from[i] = latest;
    if (slot >= 0) {
      span.to[i] = matrices + (slot * num_heads_in_all + head_in_all) * matrix;
    } else {
      span.to[i] = first + i + 1 < request.num_tokens ? scratch : nullptr;
    }
    latest = span.to[i];
  }
  state_head<kIsDelta>(sizes, tokens, span, count, head);
}

// Channels that belong to some heads: queries, keys or values.
struct ChannelRun {
  std::int64_t first, size;
};

// Writes `count` numbers, mostly 16.
static inline void put(float* to, f32x16 value, std::int64_t count) {
  count == 16 ? store_whole(to, value) : store_part(to, value, count);
}

// Convolves some channels of a token, `stride` in all; rows[0] is the earliest that it sees, of `conv_size`. Adds the bias
// [channels] unless it is null.
static inline f32x16 convolved(const float* conv, const float* bias, std::int64_t conv_size, std::int64_t stride,
                               const Element* const* rows, std::int64_t channel, std::int64_t count) {
  f32x16 sum = load_some(rows[0] + channel, count) * load_some(conv + channel, count);
  for (std::int64_t tap = 1; tap < conv_size; ++tap)
    sum = load_some(rows[tap] + channel, count) * load_some(conv + tap * stride + channel, count) + sum;
  return bias ? sum + load_some(bias + channel, count) : sum;
}

static inline void convolve(const float* conv, const float* bias, std::int64_t conv_size, std::int64_t stride,
                            const Element* const* rows, ChannelRun run, float* out) {
  for (std::int64_t i = 0; i < run.size; i += 16) {
    const std::int64_t count = smaller(16, run.size - i);
    put(out + i, silu(convolved(conv, bias, conv_size, stride, rows, run.first + i, count)), count);
  }
}

// ln(1 + e^x).
static inline float softplus(float x) { return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x)); }

static inline float dot_product(const float* a, const float* b, std::int64_t size) {
  f32x16 sum = splat(0.0f);
  for (std::int64_t i = 0; i < size; i += 16) {
    const std::int64_t count = smaller(16, size - i);
    sum = load_some(a + i, count) * load_some(b + i, count) + sum;
  }
  return sum_of_lanes(sum);
}

static inline float to_float(const Element* from) { return load_part(from, 1)[0]; }
