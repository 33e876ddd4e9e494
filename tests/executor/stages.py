"""A worker with the real model, one of whose stages fails at a word: in a process, it has to be told in tokens."""

from typing import Any

from octavo.attention.metadata import ForwardBatch
from octavo.models.interfaces import IntermediateTensors
from octavo.worker.worker import Worker

BAD_TOKEN = 96  # in a prompt: the first stage's forward raises


class FragileWorker(Worker):
    """Fails once the model is there; warm-up prompts have other tokens, or are too short to count."""

    def initialize_kv_cache(self, num_blocks: list[int]) -> None:
        super().initialize_kv_cache(num_blocks)
        if self.place.pp_rank == 0:
            graph = self.runner.graph
            owner, name = (self.runner.model, "run_stage") if graph is None else (graph, "run")
            run_stage = getattr(owner, name)

            def run(batch: ForwardBatch, *arguments: Any) -> IntermediateTensors:
                if batch.input_ids.tolist().count(BAD_TOKEN) > 1:
                    raise ValueError("bad luck")
                computed: IntermediateTensors = run_stage(batch, *arguments)
                return computed

            owner.__dict__[name] = run
