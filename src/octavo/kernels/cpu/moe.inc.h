// Mixture of experts. Included inside namespace octavo::OCTAVO_LEVEL. Definition: ops.h, kernels/reference.py.
//
// Pairs of a token and an expert are sorted by expert, so that each expert's weights are read once for all of its rows.
// A row's result does not depend on the other rows of its expert: tiles guarantee that, as in all linear layers.
//
// Legend: T = tokens, C = experts per token, R = pairs, X = experts, D = hidden size, I = intermediate size.

// out = sum over a token's pairs, in order, of weight * answer. `place` null: answers are in pair order.
template <class Element>
static void combine_rows(const Element* answers, const std::int64_t* place, const float* weights, std::int64_t num_tokens,
                         std::int64_t num_choices, std::int64_t size, Element* out, Pool& pool) {
  const auto answer = [&](std::int64_t pair) { return answers + (place ? place[pair] : pair) * size; };
  pool.run(ceil_div(num_tokens, kTokensTogether), [&](std::int64_t chunk) {
    const std::int64_t end = smaller(num_tokens, (chunk + 1) * kTokensTogether);
    for (std::int64_t token = chunk * kTokensTogether; token < end; ++token) {
      for (std::int64_t i = 0; i < size; i += 16) {
        const std::int64_t count = smaller(16, size - i);
        f32x16 total = splat(0.0f);
        for (std::int64_t pair = token * num_choices; pair < (token + 1) * num_choices; ++pair)
          total += load_some(answer(pair) + i, count) * weights[pair];
        store_some(out + token * size + i, total, count);
      }
    }
  });
}

static void combine_experts(const CombineArgs& args, Pool& pool) {
  combine_rows(static_cast<const Element*>(args.answers), nullptr, args.weights, args.num_tokens, args.num_choices, args.size,
               static_cast<Element*>(args.out), pool);
}

static void route(const RouteArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  if (rows.rows == 0) return;
  struct Memory {
    LeftElement* left;
    float* logits;
  };
  const Memory memory = placed(pool, [&](Room& room) -> Memory {
    return {room.take<LeftElement>(left_elements(rows.rows, rows.size)), room.take<float>(rows.rows * args.router.out_size)};
  });
  pack_rows(rows, memory.left, pool);
  multiply_router(args.router, memory.left, rows.rows, ceil_div(rows.size, 32), memory.logits, pool);
  choose_for_tokens(args.routing, args.router, rows.rows, memory.logits, args.expert_ids, args.weights, pool);
}

// `Kind` of experts: PlainExperts or the integer ones.
template <class Kind>
static void expert_rows_by(const ExpertRowsArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  if (args.num_pairs == 0) return;
  Kind experts = placed(pool, [&](Room& room) { return Kind::in(room, args.experts, rows.rows, args.num_pairs, rows.size); });
  experts.take(rows, args.experts, pool);
  const Pairs pairs = {args.num_pairs, args.expert_ids, args.token_ids, 0};
  experts.compute(args.experts, rows.fused.activation, rows.size, pairs, pool);
  pool.run(ceil_div(args.num_pairs, kTokensTogether), [&](std::int64_t chunk) {
    const std::int64_t end = smaller(args.num_pairs, (chunk + 1) * kTokensTogether);
    for (std::int64_t pair = chunk * kTokensTogether; pair < end; ++pair)
      __builtin_memcpy(static_cast<decltype(experts.answers)>(args.out) + pair * rows.size,
                       experts.answers + experts.sorted.place[pair] * rows.size,
                       static_cast<std::size_t>(rows.size) * sizeof *experts.answers);
  });
}

template <class Kind>
static void moe_by(const MoeArgs& args, Pool& pool) {
  const RowsArgs& rows = args.rows;
  if (rows.rows == 0) return;
  const std::int64_t num_choices = args.routing.num_choices(), num_pairs = rows.rows * num_choices;
  struct Memory {
    float* logits;
    std::int64_t* expert_ids;
    float* weights;
    Kind experts;
  };
  Memory memory = placed(pool, [&](Room& room) -> Memory {
    return {room.take<float>(rows.rows * args.router.out_size), room.take<std::int64_t>(num_pairs),
            room.take<float>(num_pairs), Kind::in(room, args.experts, rows.rows, num_pairs, rows.size)};
  });
  Kind& experts = memory.experts;
  experts.take(rows, args.experts, pool);
  experts.multiply_router(rows, args.router, memory.logits, pool);
  choose_for_tokens(args.routing, args.router, rows.rows, memory.logits, memory.expert_ids, memory.weights, pool);
  const Pairs pairs = {num_pairs, memory.expert_ids, nullptr, num_choices};
  experts.compute(args.experts, rows.fused.activation, rows.size, pairs, pool);
  for (std::int64_t expert = 0; expert < args.routing.num_experts; ++expert) args.load[expert] += experts.sorted.rows_of(expert);
  combine_rows(experts.answers, experts.sorted.place, memory.weights, rows.rows, num_choices, rows.size,
               static_cast<decltype(experts.answers)>(args.out), pool);
}
