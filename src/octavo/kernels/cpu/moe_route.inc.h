// Expert routing. Included inside namespace octavo::OCTAVO_LEVEL. Definition: ops.h, kernels/reference.py.

// values[i] = e^(values[i] - most), in place.
static inline void exponentials(float* values, std::int64_t count, float most) {
  for (std::int64_t i = 0; i < count; i += 16) {
    float lanes[16] = {};
    const std::size_t size = static_cast<std::size_t>(smaller(16, count - i)) * sizeof(float);
    __builtin_memcpy(lanes, values + i, size);
    store_f32(lanes, exponential(load_f32(lanes) - most));
    __builtin_memcpy(values + i, lanes, size);
  }
}

static inline float sum_in_order(const float* values, std::int64_t count) {
  float sum = 0.0f;
  for (std::int64_t i = 0; i < count; ++i) sum += values[i];
  return sum;
}

// The largest logits in descending order, ties by the lower index. NaN compares as not larger.
static inline void find_largest(const float* logits, std::int64_t num_logits, std::int64_t count, std::int64_t* ids,
                                float* largest) {
  std::int64_t num_found = 0;
  for (std::int64_t id = 0; id < num_logits; ++id) {
    if (num_found == count && !(logits[id] > largest[count - 1])) continue;
    std::int64_t at = num_found < count ? num_found++ : count - 1;
    for (; at > 0 && logits[id] > largest[at - 1]; --at) largest[at] = largest[at - 1], ids[at] = ids[at - 1];
    largest[at] = logits[id], ids[at] = id;
  }
}

// One token's experts and their weights, from its logits, which are overwritten.
static inline void choose_experts(const Routing& routing, float* logits, std::int64_t* ids, float* weights) {
  find_largest(logits, routing.num_experts, routing.top_k, ids, weights);
  const float most = weights[0];
  exponentials(weights, routing.top_k, most);
  float total = 0.0f;
  if (routing.renormalizes) {
    total = sum_in_order(weights, routing.top_k);
  } else {
    exponentials(logits, routing.num_experts, most);
    total = sum_in_order(logits, routing.num_experts);
  }
  for (std::int64_t i = 0; i < routing.top_k; ++i) weights[i] /= total;
  if (routing.has_shared) {
    float gate = -logits[routing.num_experts];
    exponentials(&gate, 1, 0.0f);
    ids[routing.top_k] = routing.num_experts, weights[routing.top_k] = 1.0f / (1.0f + gate);
  }
}

constexpr std::int64_t kTokensTogether = 8;  // per chunk; a token takes about a microsecond

// `left`: the tokens as left tiles. `logits`: [T, outputs of the router].
static void multiply_router(const PackedWeight& router, const LeftElement* left, std::int64_t num_tokens, std::int64_t num_k,
                            float* logits, Pool& pool) {
  multiply({left, num_tokens, num_k, router, {Output::float32, router.out_size, logits, nullptr}}, pool);
}

static void choose_for_tokens(const Routing& routing, const PackedWeight& router, std::int64_t num_tokens, float* logits,
                              std::int64_t* ids, float* weights, Pool& pool) {
  const std::int64_t num_choices = routing.num_choices();
  pool.run(ceil_div(num_tokens, kTokensTogether), [&](std::int64_t chunk) {
    const std::int64_t end = smaller(num_tokens, (chunk + 1) * kTokensTogether);
    for (std::int64_t token = chunk * kTokensTogether; token < end; ++token)
      choose_experts(routing, logits + token * router.out_size, ids + token * num_choices, weights + token * num_choices);
  });
}
