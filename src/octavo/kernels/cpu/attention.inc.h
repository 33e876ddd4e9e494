// Attention over paged memory. Included inside namespace octavo::OCTAVO_LEVEL.
//
// Batch-invariant: a row's context is processed in spans at absolute positions; within a span, scores are products in a
// fixed order, weights are summed lane by lane, and values are added position by position. Tiles outside a row's mask
// add exact zeros, so row blocks may include or skip them.

static void attention(const AttentionArgs& args, Pool& pool) {
  const std::int64_t tokens = larger(1, smaller(16, args.num_tokens / (pool.num_threads() * kChunksPerThread)));
  // All keys and values are written before any is read: requests of one step may share blocks.
  if (args.num_parts > 1 || args.latent_size) {
    const InPhase phase(pool.phases(), Phase::keys);
    pool.run(ceil_div(args.num_tokens, tokens), [&](std::int64_t chunk) {
      const std::int64_t end = smaller(args.num_tokens, (chunk + 1) * tokens);
      args.latent_size ? write_latents<Element>(args, chunk * tokens, end) : write_kv<Element>(args, chunk * tokens, end);
    });
  }
  const InPhase phase(pool.phases(), Phase::attention);
  const Work todo(args, pool);
  const Split split(args, todo, pool);
  pool.run(split.num_chunks(), [&](std::int64_t index) {
    const Split::Chunk chunk = split.chunk(index);
    chunk.is_part ? attend_part<Element>(args, todo, split, chunk) : attend_item<Element>(args, todo, chunk.item);
  });
  pool.run(split.num_items(), [&](std::int64_t index) {
    join_parts<Element>(args, todo, split, split.first_item() + index);
  });
}
