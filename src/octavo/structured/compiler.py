"""Compiles grammars in background threads and caches them. The engine loop never waits for it."""

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic

from octavo.errors import GrammarTooComplexError, InvalidParameterError, OctavoError, RequestError, UserError
from octavo.structured.backend import CompiledGrammar, GrammarBackend, MatcherT
from octavo.structured_output import StructuredOutput

MAX_CACHED = 64
NUM_THREADS = 2


class CompileJob(Generic[MatcherT]):
    """One constraint being compiled, or compiled."""

    def __init__(self) -> None:
        self.future: Future[CompiledGrammar[MatcherT]] = Future()
        self.started_s: float | None = None

    def is_over(self, now_s: float, time_limit_s: float) -> bool:
        """True if there is nothing left to wait for."""
        return self.future.done() or (self.started_s is not None and now_s - self.started_s > time_limit_s)

    def error(self, time_limit_s: float) -> OctavoError | None:
        """Return why this finished job failed, or None."""
        if not self.future.done():
            return GrammarTooComplexError(f"structured_output was not compiled within {time_limit_s:g} s")
        error = self.future.exception()
        if isinstance(error, InvalidParameterError):
            return UserError(str(error))  # fields of an error do not cross the process boundary
        if error is None or isinstance(error, OctavoError):
            return error
        text = f"compiling structured_output failed: {type(error).__name__}: {error}"
        is_refusal = isinstance(error, ValueError) or not isinstance(
            error, Exception
        )  # the library's panics are neither
        return UserError(text) if is_refusal else RequestError(text)


class GrammarCompiler(Generic[MatcherT]):
    """Owned by one thread. The backend, which takes a second for a large vocabulary, is created with the first job."""

    def __init__(self, make_backend: Callable[[], GrammarBackend[MatcherT]]) -> None:
        self._make_backend = make_backend
        self._threads: ThreadPoolExecutor | None = None
        self._backend: Future[GrammarBackend[MatcherT]] | None = None
        self._jobs: OrderedDict[StructuredOutput, CompileJob[MatcherT]] = OrderedDict()  # least recently used first

    @property
    def backend(self) -> GrammarBackend[MatcherT]:
        """The grammar backend. Available once any job has completed."""
        assert self._backend is not None
        return self._backend.result()

    def submit(self, constraint: StructuredOutput) -> CompileJob[MatcherT]:
        """Return the job for `constraint`; start one unless it is cached."""
        if constraint in self._jobs:
            self._jobs.move_to_end(constraint)
            return self._jobs[constraint]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="octavo-grammar")
            self._backend = self._threads.submit(self._make_backend)
        job = CompileJob[MatcherT]()
        self._threads.submit(self._run, job, constraint)
        self._jobs[constraint] = job
        if len(self._jobs) > MAX_CACHED:
            self._jobs.popitem(last=False)
        return job

    def close(self) -> None:
        """Start no more jobs. A running job ends by the backend's own limits."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, job: CompileJob[MatcherT], constraint: StructuredOutput) -> None:
        try:
            backend = self.backend
            job.started_s = time.monotonic()
            job.future.set_result(backend.compile(constraint))
        except BaseException as error:  # noqa: BLE001 - it belongs to the requests that wait; a panic is no `Exception`
            job.future.set_exception(error)
