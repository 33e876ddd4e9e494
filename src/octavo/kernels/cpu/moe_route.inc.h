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

// The largest of `value(id)` for ids begin ... end - 1, after those already found: in descending order, ties by the lower
// index. NaN compares as not larger.
template <class Value>
static inline void find_largest(const Value& value, std::int64_t begin, std::int64_t end, std::int64_t count,
                                std::int64_t& num_found, std::int64_t* ids, float* largest) {
  for (std::int64_t id = begin; id < end; ++id) {
    const float now = value(id);
    if (num_found == count && !(now > largest[count - 1])) continue;
    std::int64_t at = num_found < count ? num_found++ : count - 1;
    for (; at > 0 && now > largest[at - 1]; --at) largest[at] = largest[at - 1], ids[at] = ids[at - 1];
    largest[at] = now, ids[at] = id;
  }
}

// By the largest logits, weighted by softmax; `logits` are overwritten.
static inline void choose_by_logit(const Routing& routing, float* logits, std::int64_t* ids, float* weights) {
  std::int64_t num_found = 0;
  find_largest([&](std::int64_t id) { return logits[id]; }, 0, routing.num_experts, routing.top_k, num_found, ids, weights);
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
}

// Logits to scores, in place.
static inline void score_experts(const Routing& routing, float* logits) {
  const std::int64_t count = routing.num_experts;
  if (!routing.is_softmax) {
    for (std::int64_t i = 0; i < count; ++i) logits[i] = -logits[i];
    exponentials(logits, count, 0.0f);
    for (std::int64_t i = 0; i < count; ++i) logits[i] = 1.0f / (1.0f + logits[i]);
    return;
  }
  float most = logits[0];
  for (std::int64_t i = 1; i < count; ++i) most = logits[i] > most ? logits[i] : most;
  exponentials(logits, count, most);
  const float total = sum_in_order(logits, count);
  for (std::int64_t i = 0; i < count; ++i) logits[i] /= total;
}

// By corrected scores, in the best groups; `logits` are overwritten.
static inline void choose_by_score(const Routing& routing, float* logits, std::int64_t* ids, float* weights) {
  score_experts(routing, logits);
  const auto value = [&](std::int64_t id) { return routing.correction ? logits[id] + routing.correction[id] : logits[id]; };
  bool is_hidden[Routing::kMaxGroups] = {};
  std::int64_t num_found = 0;
  const std::int64_t size = routing.num_experts / routing.num_groups;
  if (routing.num_groups > 1) {
    float of_groups[Routing::kMaxGroups], best_groups[Routing::kMaxGroups];
    for (std::int64_t group = 0; group < routing.num_groups; ++group) {
      std::int64_t best_ids[2], num_best = 0;
      float best[2];
      find_largest(value, group * size, (group + 1) * size, routing.group_best, num_best, best_ids, best);
      of_groups[group] = routing.group_best == 1 ? best[0] : best[0] + best[1];
    }
    std::int64_t num_groups = 0, groups[Routing::kMaxGroups];
    find_largest([&](std::int64_t group) { return of_groups[group]; }, 0, routing.num_groups, routing.top_groups, num_groups,
                 groups, best_groups);
    for (bool& hidden : is_hidden) hidden = true;
    for (std::int64_t i = 0; i < routing.top_groups; ++i) is_hidden[groups[i]] = false;
  }
  for (std::int64_t group = 0; group < routing.num_groups; ++group)
    if (!is_hidden[group])
      find_largest(value, group * size, (group + 1) * size, routing.top_k, num_found, ids, weights);
  for (std::int64_t i = 0; i < routing.top_k; ++i) weights[i] = logits[ids[i]];
  if (!routing.renormalizes) return;
  const float total = sum_in_order(weights, routing.top_k) + routing.epsilon;
  for (std::int64_t i = 0; i < routing.top_k; ++i) weights[i] /= total;
}

// One token's experts and their weights, from its logits, which are overwritten.
static inline void choose_experts(const Routing& routing, float* logits, std::int64_t* ids, float* weights) {
  float gate = routing.has_shared && routing.gates_shared ? -logits[routing.num_experts] : 0.0f;
  routing.chooses_by_logit ? choose_by_logit(routing, logits, ids, weights) : choose_by_score(routing, logits, ids, weights);
  for (std::int64_t i = 0; routing.scale != 1.0f && i < routing.top_k; ++i) weights[i] *= routing.scale;
  if (!routing.has_shared) return;
  exponentials(&gate, 1, 0.0f);
  ids[routing.top_k] = routing.num_experts;
  weights[routing.top_k] = routing.gates_shared ? 1.0f / (1.0f + gate) : 1.0f;
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
