"""One benchmark run: finds the model, warms up the server, sends all requests and collects the records."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.cli.load.generator import LoadGenerator
from octavo.cli.load.recorder import RequestRecord
from octavo.cli.load.workload import WorkloadSpec, plan_requests
from octavo.cli.remote.http import HttpClient
from octavo.cli.remote.wire import find_model
from octavo.errors import RequestError

NUM_COMPLAINTS = 3  # failures quoted in the error


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """Target and mode of a run: an open loop at the workload's times, or `concurrency` requests in flight."""

    url: str
    api_key: str | None
    workload: WorkloadSpec
    concurrency: int | None
    num_warmup: int
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """A record per request, and the CPU seconds that this process used for the run."""

    model: str
    records: Sequence[RequestRecord]
    cpu_s: float


async def measure(run: RunSpec) -> MeasuredRun:
    """Send the requests of a run.

    The warm-up uses another seed, so that nothing of what is measured is in the server's cache.

    Raises:
        RequestError: the server cannot be reached, or a warm-up request fails.
    """
    async with HttpClient(run.url, api_key=run.api_key) as client:
        model = await find_model(client, run.workload.model)
        workload = replace(run.workload, model=model)
        planned = plan_requests(workload)
        warmup = plan_requests(replace(workload, seed=workload.seed + 1, num_prompts=run.num_warmup))
        load = LoadGenerator(client, workload.endpoint, run.timeout_s)
        raise_failures(await load.run_closed(warmup, 1))
        start_cpu_s = time.process_time()
        if run.concurrency is None:
            records = await load.run_open(planned)
        else:
            records = await load.run_closed(planned, run.concurrency)
        return MeasuredRun(model=model, records=records, cpu_s=time.process_time() - start_cpu_s)


def raise_failures(records: Sequence[RequestRecord]) -> None:
    """Raise an error with the number of failed requests and the first few messages, if any failed.

    Raises:
        RequestError: at least one request failed.
    """
    errors = [record.error for record in records if record.error is not None]
    if errors:
        shown = "; ".join(dict.fromkeys(errors[:NUM_COMPLAINTS]))
        raise RequestError(f"{len(errors)} of {len(records)} requests failed: {shown}")
