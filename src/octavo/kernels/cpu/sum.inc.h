// All-reduce sums. Included inside namespace octavo::OCTAVO_LEVEL.

// `count` elements from `at` on, at most 16.
template <class Element>
static inline void sum_at(const SumArgs& args, std::int64_t at, std::int64_t count) {
  f32x16 total = load_some(static_cast<const Element*>(args.parts[0]) + at, count);
  for (int part = 1; part < args.num_parts; ++part)
    total += load_some(static_cast<const Element*>(args.parts[part]) + at, count);
  store_some(static_cast<Element*>(args.out) + at, total, count);
}

template <class Element>
static inline void sum_of(const SumArgs& args) {
  const std::int64_t num_whole = args.count / 16 * 16;
  for (std::int64_t at = 0; at < num_whole; at += 16) sum_at<Element>(args, at, 16);
  if (args.count > num_whole) sum_at<Element>(args, num_whole, args.count - num_whole);
}

static void sum(const SumArgs& args) {
  switch (args.dtype) {
    case DType::bfloat16: return sum_of<bf16>(args);
    case DType::float16: return sum_of<f16>(args);
    case DType::float32: return sum_of<float>(args);
  }
}
