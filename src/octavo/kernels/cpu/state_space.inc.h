// Mamba-2's state space (Dao and Gu 2024, arXiv:2405.21060), token by token, and the norm behind it. Included inside
// namespace octavo::OCTAVO_LEVEL.
//
// A chunk of work is some heads of a group, of a request: recurrence.inc.h. Groups may be few, so heads of one share its
// keys and queries across chunks, each of which convolves them for itself. Nobody writes the convolution's states and the
// log meanwhile: that follows, request by request.

constexpr std::int64_t kHeadsAtOnce = 8;

// The tokens of one request.
struct SpaceTokens : RequestTokens {
  const StateSpaceArgs& args;

  Element* log() const { return static_cast<Element*>(args.log) + args.rows[request] * args.log_tokens * args.log_size(); }
  // Token number `token` of the request in this step: its channels, then its steps.
  const Element* inputs(std::int64_t token) const {
    if (is_again(token)) return log() + token * args.log_size();
    return static_cast<const Element*>(args.rows_in) + row(token) * args.row_size() + args.width();
  }
};

// Some heads of one group.
struct SpaceHeads {
  std::int64_t group, first, count;
};

// How much of the state each head keeps of a token, and how much of its value it takes.
static inline void read_steps(const SpaceTokens& tokens, const SpaceHeads& heads, std::int64_t token, float* decay, float* dt) {
  const StateSpaceArgs& args = tokens.args;
  const Element* steps = tokens.inputs(token) + args.num_channels();
  for (std::int64_t i = 0; i < heads.count; ++i) {
    const std::int64_t head = heads.first + i;
    const float step = softplus(to_float(steps + head) * args.dt_scale + args.dt_bias[head]);
    const float floored = step < args.least_dt ? args.least_dt : step;  // NaN stays
    dt[i] = floored > args.most_dt ? args.most_dt : floored;
    decay[i] = __builtin_expf(-args.decay_rates[head] * dt[i]);
  }
}

// Writes what a token of the step has read, and what of its values skips the state, times its gates.
static inline void write_heads(const SpaceTokens& tokens, const SpaceHeads& heads, std::int64_t token, const float* read,
                               const float* value) {
  const StateSpaceArgs& args = tokens.args;
  const std::int64_t size = args.value_size, row = tokens.row(token);
  for (std::int64_t i = 0; i < heads.count; ++i, read += size, value += size) {
    const std::int64_t column = (heads.first + i) * size;
    const Element* gates = static_cast<const Element*>(args.rows_in) + row * args.row_size() + column;
    Element* out = static_cast<Element*>(args.out) + row * args.width() + column;
    const float skip = args.skip[heads.first + i];
    for (std::int64_t j = 0; j < size; j += 16) {
      const std::int64_t count = smaller(16, size - j);
      const f32x16 sum = load_some(value + j, count) * skip + load_some(read + j, count);
      store_some(out + j, args.applies_gates ? sum * silu(load_some(gates + j, count) * args.gate_scale) : sum, count);
    }
  }
}

static void compute_heads(const SpaceTokens& tokens, const SpaceHeads& heads) {
  const StateSpaceArgs& args = tokens.args;
  const std::int64_t past = args.conv_size - 1, num_channels = args.num_channels(), r = heads.count;
  const std::int64_t key_size = args.key_size, values = r * args.value_size, matrix = key_size * args.value_size;
  const std::int64_t keys = args.num_groups * key_size, first_key = args.width() + heads.group * key_size;
  const ChannelRun runs[3] = {{first_key + keys, key_size}, {first_key, key_size}, {heads.first * args.value_size, values}};

  const StateSizes sizes = {key_size, args.value_size, r};

  // Scratch: states, what tokens have, and zeros for the convolution.
  const std::int64_t num_floats = r * matrix + DeltaTokens::num_floats(sizes);
  const std::size_t row_bytes = static_cast<std::size_t>(num_channels) * sizeof(Element);
  float* states =
      static_cast<float*>(thread_scratch().bytes(static_cast<std::size_t>(num_floats) * sizeof(float) + row_bytes));
  DeltaTokens some = DeltaTokens::in(states + r * matrix, sizes);
  Element* zeros = reinterpret_cast<Element*>(states + num_floats);

  const std::int64_t begin = args.begins[tokens.request];
  if (begin < 0) __builtin_memset(zeros, 0, row_bytes);
  const Element* before = static_cast<const Element*>(args.conv_states) + begin * past * num_channels;
  const auto row_of = [&](std::int64_t token) {
    if (token >= 0) return tokens.inputs(token);
    return begin < 0 ? static_cast<const Element*>(zeros) : before + (past + token) * num_channels;
  };
  const float* latest[kHeadsAtOnce];  // of each head: where its state is; null: zeros
  for (std::int64_t i = 0; i < r; ++i)
    latest[i] = begin < 0 ? nullptr : args.matrices + (begin * args.num_heads + heads.first + i) * matrix;
  for (std::int64_t first = 0; first < tokens.num_tokens; first += kTokensAtOnce) {
    const std::int64_t count = smaller(kTokensAtOnce, tokens.num_tokens - first);
    for (std::int64_t i = 0; i < count; ++i) {
      const Element* rows[kMaxConvTokens + 1];
      for (std::int64_t tap = 0; tap <= past; ++tap) rows[tap] = row_of(first + i - past + tap);
      float* to[3] = {some.query + i * key_size, some.key + i * key_size, some.value + i * values};
      for (int kind = 0; kind < 3; ++kind)
        convolve(args.conv, args.conv_bias, args.conv_size, num_channels, rows, runs[kind], to[kind]);
      some.product[i] = dot_product(to[0], to[1], key_size);
      read_steps(tokens, heads, first + i, some.decay + i * r, some.beta + i * r);
    }
    for (std::int64_t head = 0; head < r; ++head)
      state_tokens<false>(sizes, some, args, tokens, first, count, head, heads.first + head, args.num_heads, args.matrices,
                          states + head * matrix, latest[head]);
    for (std::int64_t i = 0; i < count; ++i)
      if (!tokens.is_again(first + i))
        write_heads(tokens, heads, first + i, some.read + i * values, some.value + i * values);
  }
}

// Writes the convolution's states behind tokens with slots, and logs the inputs of drafts.
static void keep_inputs(const SpaceTokens& tokens) {
  const StateSpaceArgs& args = tokens.args;
  const std::int64_t past = args.conv_size - 1, num_channels = args.num_channels();
  const std::size_t row_bytes = static_cast<std::size_t>(num_channels) * sizeof(Element);
  const std::int64_t begin = args.begins[tokens.request];
  Element* states = static_cast<Element*>(args.conv_states);
  Element* before = static_cast<Element*>(thread_scratch().bytes(static_cast<std::size_t>(past) * row_bytes));
  if (begin < 0)
    __builtin_memset(before, 0, static_cast<std::size_t>(past) * row_bytes);
  else
    __builtin_memcpy(before, states + begin * past * num_channels, static_cast<std::size_t>(past) * row_bytes);
  for (std::int64_t token = tokens.num_again; token < tokens.num_tokens; ++token) {
    const std::int64_t slot = tokens.slot(args, token);
    if (slot < 0) continue;
    for (std::int64_t tap = 0; tap < past; ++tap) {
      const std::int64_t seen = token + 1 - past + tap;
      const Element* from = seen < 0 ? before + (past + seen) * num_channels : tokens.inputs(seen);
      __builtin_memcpy(states + (slot * past + tap) * num_channels, from, row_bytes);
    }
  }
  for (std::int64_t draft = 0; draft < tokens.num_drafts; ++draft)
    __builtin_memcpy(tokens.log() + draft * args.log_size(), tokens.inputs(tokens.num_tokens - tokens.num_drafts + draft),
                     static_cast<std::size_t>(args.log_size()) * sizeof(Element));
}

static void state_space(const StateSpaceArgs& args, Pool& pool) {
  const InPhase phase(pool.phases(), Phase::states);
  // As many heads at once as leave some chunks for each thread.
  const std::int64_t shared = args.shared(), groups = args.num_requests * args.num_groups;
  const std::int64_t wanted = larger(1, ceil_div(4 * pool.num_threads(), larger(1, groups)));
  const std::int64_t at_once = smaller(kHeadsAtOnce, larger(1, shared / wanted));
  const std::int64_t per_group = ceil_div(shared, at_once), per_request = args.num_groups * per_group;
  pool.run(args.num_requests * per_request, [&](std::int64_t chunk) {
    const std::int64_t group = chunk % per_request / per_group, first = chunk % per_group * at_once;
    compute_heads({RequestTokens::of(args, chunk / per_request), args}, {group, group * shared + first, smaller(at_once, shared - first)});
  });
  pool.run(args.num_requests, [&](std::int64_t request) { keep_inputs({RequestTokens::of(args, request), args}); });
}

static inline float sum_of_squares(const Element* x, std::int64_t size) {
  f32x16 sum = splat(0.0f);
  for (std::int64_t i = 0; i < size; i += 16) {
    const f32x16 part = load_some(x + i, smaller(16, size - i));
    sum = part * part + sum;
  }
  return sum_of_lanes(sum);
}

static void norm_groups_of_row(const GroupNormArgs& args, std::int64_t row) {
  const Element* x = static_cast<const Element*>(args.x) + row * args.width;
  float* sums = args.sums ? args.sums + row * args.num_groups : nullptr;
  if (args.only_sums) __builtin_memset(sums, 0, static_cast<std::size_t>(args.num_groups) * sizeof(float));
  for (std::int64_t column = 0; column < args.width;) {
    const std::int64_t group = (args.first_column + column) / args.group_size;
    const std::int64_t size = smaller(args.width, (group + 1) * args.group_size - args.first_column) - column;
    if (args.only_sums) {
      sums[group] = sum_of_squares(x + column, size);
    } else {
      const float sum = sums ? sums[group] : sum_of_squares(x + column, size);
      const float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(args.group_size) + args.eps);
      const Element* gates = args.gates ? static_cast<const Element*>(args.gates) + row * args.gate_stride + column : nullptr;
      Element* out = static_cast<Element*>(args.out) + row * args.width + column;
      for (std::int64_t i = 0; i < size; i += 16) {
        const std::int64_t count = smaller(16, size - i);
        const f32x16 normed = load_some(x + column + i, count) * scale * load_some(args.weight + column + i, count);
        store_some(out + i, gates ? normed * silu(load_some(gates + i, count) * args.gate_scale) : normed, count);
      }
    }
    column += size;
  }
}

static void norm_groups(const GroupNormArgs& args, Pool& pool) {
  const std::int64_t group = larger(1, (std::int64_t{1} << 13) / larger(1, args.width));  // a few microseconds
  pool.run(ceil_div(args.num_rows, group), [&](std::int64_t chunk) {
    for (std::int64_t row = chunk * group; row < smaller(args.num_rows, (chunk + 1) * group); ++row)
      norm_groups_of_row(args, row);
  });
}
