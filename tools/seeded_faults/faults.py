"""The list of faults: each a piece of text that stands exactly once below src/octavo, and what stands there instead.

No file is named, so code may move. Where code changes its wording a fault no longer applies, and the tool says which:
mend it here, so that it is wrong in the same way.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One mistake, and the tests that are to notice it."""

    name: str
    right: str
    wrong: str
    tests: str  # arguments for pytest, relative to tests/
    is_cpp: bool = False


FAULTS = [
    # -- hybrids
    Fault(
        name="a draft ends a block of states",
        right="np.minimum(room, size - 2 - running.num_computed[rows] % size)",
        wrong="np.minimum(room, size - 1 - running.num_computed[rows] % size)",
        tests="scheduler/test_recurrent.py scheduler/test_random_schedules.py",
    ),
    Fault(
        name="accepted drafts are missing from a state",
        right="num_replayed = start - before.first if",
        wrong="num_replayed = 0 if",
        tests="end_to_end/test_hybrids.py",
    ),
    Fault(
        name="value heads of a GGUF file share the wrong key heads",
        right="return by_head.transpose(0, 1).reshape(rows.shape)",
        wrong="return by_head.reshape(rows.shape)",
        tests="gguf/test_qwen35.py",
    ),
    Fault(
        name="the gate of attention is that of another head",
        right="grouped = rows.view(self._num_groups, -1, *rows.shape[1:])",
        wrong="grouped = rows.view(1, -1, *rows.shape[1:])",
        tests="models/test_exactness.py",
    ),
    Fault(
        name="steps of state spaces are not bounded",
        right="    dt = dt.clamp(*weights.dt_limit)\n",
        wrong="",
        tests="kernels/test_state_ops.py",
    ),
    Fault(
        name="keys of a state space are its queries",
        right="value, key, query = mixed.split_with_sizes",
        wrong="value, query, key = mixed.split_with_sizes",
        tests="kernels/test_state_ops.py",
    ),
    Fault(
        name="the states of drafts are kept",
        right="        lasts = lasts - num_drafts\n",
        wrong="        pass\n",
        tests="end_to_end/test_hybrids.py",
    ),
    # -- gpt-oss
    Fault(
        name="halves of MXFP4's blocks change places",
        right="even = first & _LOW | (second & _LOW) << 4",
        wrong="even = second & _LOW | (first & _LOW) << 4",
        tests="models/test_gpt_oss.py",
    ),
    Fault(
        name="ups of gpt-oss are taken for gates",
        right='.gate_proj.{parameter}", rows[0::2]',
        wrong='.gate_proj.{parameter}", rows[1::2]',
        tests="models/test_gpt_oss.py",
    ),
    Fault(
        name="routers leave out their biases",
        right="has_bias=moe.has_router_bias",
        wrong="has_bias=False",
        tests="models/test_exactness.py -k oss",
    ),
    # -- scheduler
    Fault(
        name="min_tokens holds one token too short",
        right="num_output_tokens > self.params.min_tokens",
        wrong="num_output_tokens >= self.params.min_tokens",
        tests="scheduler/test_stop_ids.py",
    ),
    Fault(
        name="the length cap stops one token late",
        right="        if num_tokens >= self.max_num_tokens:",
        wrong="        if num_tokens > self.max_num_tokens:",
        tests="scheduler/test_ends.py",
    ),
    Fault(
        name="an abort leaks a block",
        right="            self.blocks.free_blocks(block_ids, group)",
        wrong="            kept = int(status is RequestStatus.ABORTED)\n"
        "            self.blocks.free_blocks(block_ids[: len(block_ids) - kept], group)",
        tests="scheduler/test_ends.py scheduler/test_random_schedules.py",
    ),
    Fault(
        name="the whole of a prompt is taken from the prefix cache",
        right="chain_hashes(root, token_ids[:-1], self.block_size, keys)",
        wrong="chain_hashes(root, token_ids, self.block_size, keys)",
        tests="scheduler/test_prefix_reuse.py",
    ),
    Fault(
        name="tenants share prefixes in spite of their salts",
        right='[] if self.cache_salt is None else ["salt", self.cache_salt]',
        wrong="list[str]()",
        tests="scheduler/test_block_hash.py scheduler/test_prefix_reuse.py",
    ),
    Fault(
        name="a recurrent state is begun from in the step that leaves it",
        right="None if (group, block_id) in unwritten else block_id",
        wrong="block_id",
        tests="scheduler/test_recurrent.py scheduler/test_random_schedules.py",
    ),
    Fault(
        name="a preempted request is computed again from a block too far",
        right="self.num_hashed[row] = prefix.num_tokens\n",
        wrong="self.num_hashed[row] = prefix.num_tokens + (request.num_preemptions > 0) * self.blocks.block_size\n",
        tests="scheduler/test_preemption.py scheduler/test_random_schedules.py",
    ),
    # -- worker, attention, kernels
    Fault(
        name="a block that a sliding window still sees is freed",
        right="np.maximum(next_tokens - (kind.sliding_window - 1), 0)",
        wrong="np.maximum(next_tokens - (kind.sliding_window - 2), 0)",
        tests="end_to_end/test_sliding_windows.py scheduler/test_random_schedules.py",
    ),
    Fault(
        name="the last slot of a block is written twice",
        right="* block_size + at_offsets\n",
        wrong="* block_size + at_offsets.clamp(max=max(0, block_size - 2))\n",
        tests="end_to_end/test_greedy.py -k qwen3",
    ),
    Fault(
        name="a sliding window sees one position more",
        right="hidden | (keys <= queries - layer.sliding_window)",
        wrong="hidden | (keys < queries - layer.sliding_window)",
        tests="attention/test_backends.py -k tiled",
    ),
    Fault(
        name="equal router logits go to the higher expert",
        right="ranked, order = values.sort(dim=-1, descending=True, stable=True)",
        wrong="ranked, order = values.flip(-1).sort(dim=-1, descending=True, stable=True)\n"
        "    order = values.shape[1] - 1 - order",
        tests="kernels/test_experts.py",
    ),
    Fault(
        name="sums of ranks are added from the last to the first",
        right="    for part in parts[1:]:\n        total += part\n    return total.to(parts[0].dtype)",
        wrong="    for part in parts[:0:-1]:\n        total += part\n    return total.to(parts[0].dtype)",
        tests="distributed/test_groups.py",
    ),
    Fault(
        name="a Triton kernel leaves out the last column",
        right="    is_inside = columns < size\n    if not ACTIVATION.is_gated",
        wrong="    is_inside = columns < size - 1\n    if not ACTIVATION.is_gated",
        tests="kernels/triton/test_ops.py -k activ",
    ),
    # -- sampling
    Fault(
        name="frequency counts once however often a token came",
        right="(said.double() * metadata.frequency",
        wrong="(said.double().clamp(max=1.0) * metadata.frequency",
        tests="sampling/test_logits_processors.py",
    ),
    Fault(
        name="top-p keeps one token too few",
        right="(above < wanted[:, None])",
        wrong="(above + mass < wanted[:, None])",
        tests="sampling/test_filters.py",
    ),
    Fault(
        name="the second sample of n has the seed of the first",
        right="    if index == 0:\n        return seed",
        wrong="    if index <= 1:\n        return seed",
        tests="test_seeds.py end_to_end/test_same_bytes.py -k 'seed'",
    ),
    Fault(
        name="a grammar's mask is off by one token",
        right="torch.arange(32, dtype=torch.int32",
        wrong="torch.arange(1, 33, dtype=torch.int32",
        tests="sampling/test_masks.py",
    ),
    # -- text and engine
    Fault(
        name="the detokenizer splits characters",
        right='b"".join([pieces[id_] for id_ in token_ids])\n        return self._decoder.decode(data)',
        wrong='b"".join([pieces[id_] for id_ in token_ids])\n        return data.decode(errors="replace")',
        tests="tokenizer/test_detokenizer.py",
    ),
    Fault(
        name="one character of a stop string is not held back",
        right="num_open = automaton.sizes[state]",
        wrong="num_open = automaton.sizes[state] if automaton.sizes[state] > 1 else 0",
        tests="engine/test_stop_strings.py",
    ),
    Fault(
        name="a stop string does not abort in the core",
        right="                front.client.abort(result.to_abort)\n            others = ",
        wrong="                pass\n            others = ",
        tests="engine/test_llm_engine.py",
    ),
    Fault(
        name="nobody tells the core that a listener has left",
        right="                self._front.client.abort(state.unfinished_core_ids())",
        wrong="                state.unfinished_core_ids()",
        tests="hostile/test_clients.py",
    ),
    Fault(
        name="a replay says tokens twice",
        right="for offset in range(num_repeated, len(token_ids)):",
        wrong="for offset in range(len(token_ids)):",
        tests="engine/test_output_processor.py",
    ),
    # -- server
    Fault(
        name="a stream that ends at its length has no last chunk",
        right="        if delta.finish_reason is not None:\n            frames.append(self._ending(delta, {}",
        wrong='        if delta.finish_reason == "stop":\n            frames.append(self._ending(delta, {}',
        tests="server/test_chat.py",
    ),
    Fault(
        name="usage leaves out the last token",
        right="sum(s.num_output_tokens for s in states)",
        wrong="sum(s.num_output_tokens - 1 for s in states)",
        tests="server/test_chat.py",
    ),
    Fault(
        name="a client's deadline is ignored",
        right="                exchange.limit_to(_deadline_header(exchange))",
        wrong="                _deadline_header(exchange)",
        tests="server/test_middleware.py server/test_numbers.py -k 'timeout or deadline or late or limit'",
    ),
    Fault(
        name="a line of a batch may be answered twice",
        right="SET record = ?, is_failed = ? WHERE batch = ? AND line = ? AND record IS NULL",
        wrong="SET record = ?, is_failed = ? WHERE batch = ? AND line = ?",
        tests="server/test_batch_runner.py",
    ),
    Fault(
        name="a batch that was interrupted begins with its first line again",
        right="WHERE batch = ? AND line > ? AND record IS NULL",
        wrong="WHERE batch = ? AND line > ?",
        tests="server/test_batch_runner.py",
    ),
    Fault(
        name="an answer that nobody waits for any more comes after the batch's files",
        right="if not stored.cancelled()]",
        wrong="if stored is not None]",
        tests="server/test_batch_runner.py",
    ),
    Fault(
        name="a line that ends before it begins keeps its place",
        right="task.add_done_callback(partial(self._release, num_samples))",
        wrong="task.add_done_callback(lambda _: None)",
        tests="server/test_batch_runner.py",
    ),
    Fault(
        name="files are shown to every key",
        right='where = "id = ? AND owner = ? AND expires_at > ?"',
        wrong='where = "id = ? AND owner IS NOT ? AND expires_at > ?"',
        tests="server/test_files.py",
    ),
    Fault(
        name="a torn last line of an offline batch stays",
        right="os.ftruncate(self._descriptor, num_whole_bytes)",
        wrong="num_whole_bytes += 0",
        tests="cli/test_batch.py",
    ),
    # -- C++
    Fault(
        name="all API keys share their idempotency keys",
        right="return digest(exchange.owner.encode(), key)",
        wrong="return digest(key)",
        tests="server/test_returning.py",
    ),
    Fault(
        name="the event that a client has is sent again",
        right="if event.number > counts[event.choice]:",
        wrong="if event.number >= counts[event.choice]:",
        tests="server/test_kept_answers.py server/test_returning.py",
    ),
    Fault(
        name="a completion that is computed again draws another seed",
        right="[params.replace(seed=seed) for seed in birth.seeds] or",
        wrong="[params for _ in birth.seeds] or",
        tests="server/test_returning_killed.py",
    ),
    Fault(
        name="the request log forgets the seeds that were drawn",
        right="self._birth = birth.of_reply(reply.facts.seeds, reply.facts.model_key)",
        wrong="self._birth = birth",
        tests="cli/test_replay.py",
    ),
    Fault(
        name="the tail of a row of bfloat16 is cut off, not rounded",
        right="  const u16x16 half = narrow(value);\n  __builtin_memcpy(to, &half,",
        wrong="  const u16x16 half = upper_halves((u32x16)value);\n  __builtin_memcpy(to, &half,",
        tests="kernels/test_rounding.py",
        is_cpp=True,
    ),
    Fault(
        name="the C++ attention's window sees one position less",
        right="larger(begin, position - args.sliding_window + 1)",
        wrong="larger(begin, position - args.sliding_window + 2)",
        tests="kernels/test_native_attention.py attention/test_backends.py",
        is_cpp=True,
    ),
    Fault(
        name="the C++ router gives equal logits to the higher expert",
        right="for (; at > 0 && now > largest[at - 1]; --at)",
        wrong="for (; at > 0 && now >= largest[at - 1]; --at)",
        tests="kernels/test_experts.py",
        is_cpp=True,
    ),
    Fault(
        name="ranks add up what they share in different orders",
        right="  for (int rank = 0; rank < size_; ++rank) parts[rank] = slot(rank);\n",
        wrong="  for (int rank = 0; rank < size_; ++rank) parts[rank] = slot((rank_ + rank) % size_);\n",
        tests="distributed/test_groups.py",
        is_cpp=True,
    ),
    # -- tenants, and the page
    Fault(
        name="rows are not kept for tenants that have none",
        right="return own == 0 or total < self._capacity - self._num_reserved(num_running)",
        wrong="return total < self._capacity",
        tests="server/test_tenants.py",
    ),
    Fault(
        name="a long prompt leaves no room for a better class",
        right="budget - self.admission.reserve(budget, self._clock())",
        wrong="budget",
        tests="scheduler/test_snapshot.py",
    ),
    Fault(
        name="the state is made when nobody looks",
        right="        if not self._watchers and self._task is not None:",
        wrong="        if False and self._task is not None:",
        tests="server/test_engine_state.py",
    ),
]
