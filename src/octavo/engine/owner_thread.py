"""`OwnerThread`: the one thread that works on an engine; callers in any thread wait for it.

Python runs signal handlers in the main thread, between any two of its instructions. An exception from one, such as
Ctrl-C, can therefore interrupt a caller's wait but never the work, whose messages and states stay in step.
"""

import queue
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

ResultT = TypeVar("ResultT")

_SIGNALS_S = 1.0  # how long a signal that the kernel delivers to another thread may stay unnoticed by a waiting caller


class Work(Protocol):
    """What the thread works on. Its methods run on that thread and do not raise."""

    @property
    def is_busy(self) -> bool:
        """Whether there is something to do for a caller or for one that has left."""
        ...

    @property
    def is_leaving(self) -> bool:
        """Whether something of a caller that has left must end before the next call begins."""
        ...

    def notice_abandoned(self) -> None:
        """Let go of calls whose callers have left."""
        ...

    def turn(self) -> None:
        """Work for one step, or wait briefly for its result."""
        ...

    def close(self) -> None:
        """Fail what is unfinished and release everything; the last method called."""
        ...


class Call(Generic[ResultT]):
    """One caller's wait for the owner.

    It waits for a plain lock: an exception inside `Condition.__enter__`, of which `Future` is made, leaves that locked.
    """

    __slots__ = ("_error", "_is_pending", "_result", "_start", "is_abandoned", "is_answered", "is_taken")

    def __init__(self, start: "Callable[[Call[ResultT]], None]") -> None:
        self._start = start
        self._is_pending = threading.Lock()
        self._is_pending.acquire()
        self._result: ResultT | None = None
        self._error: BaseException | None = None
        self.is_answered = False
        self.is_taken = False  # the caller has the result
        self.is_abandoned = False  # the caller was interrupted, possibly after the answer

    def begin(self) -> None:
        """Start the work; on the owner's thread."""
        try:
            self._start(self)
        except BaseException as error:  # noqa: BLE001 - raised in the waiting caller
            self.fail(error)

    def finish(self, result: ResultT) -> None:
        self._result = result
        self._answer()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._answer()

    def wait(self) -> ResultT:
        """Return the result, or raise what the owner raised."""
        while not self._is_pending.acquire(timeout=_SIGNALS_S):
            pass
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        return self._result  # type: ignore[return-value]  # `finish` has set it

    def _answer(self) -> None:
        self.is_answered = True
        self._is_pending.release()


class OwnerThread:
    """Runs from construction until `stop`. It is a daemon: a program may end while it works."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._inbox: queue.SimpleQueue[Call[object] | None] = queue.SimpleQueue()  # None: look whether to stop
        self._should_stop = False
        self._is_closed = False
        self._failure: BaseException | None = None  # why it could not close
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    def ask(self, start: Callable[[Call[ResultT]], None]) -> ResultT:
        """Let the owner call `start`, which answers the call, at once or in a later turn; wait for the answer.

        Raises:
            RuntimeError: the owner has stopped, or this is its own thread.
        """
        call = Call(start)
        try:
            self._post(call)
            result = call.wait()
            call.is_taken = True  # nothing can interrupt between this and the return
            return result
        except BaseException:
            call.is_abandoned = True  # nothing can interrupt before this, however many signals arrive
            raise

    def run(self, function: Callable[[], ResultT]) -> ResultT:
        """Let the owner call a function between two turns; return its result."""

        def start(call: Call[ResultT]) -> None:
            call.finish(function())

        return self.ask(start)

    def stop(self) -> None:
        """Close the work after the turn in progress. On the owner's own thread (a finalizer), do not wait for that."""
        self._should_stop = True
        self._inbox.put(None)
        if threading.current_thread() is self._thread:
            return
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _post(self, call: Call[ResultT]) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError("an engine's own thread cannot wait for the engine")
        self._inbox.put(call)  # type: ignore[arg-type]  # the inbox never looks at results
        if self._is_closed or not self._thread.is_alive():  # in a forked process, the thread does not exist
            raise RuntimeError("this engine has exited, or was made in a process that has been forked")

    def _run(self) -> None:
        while not self._should_stop:
            self._take_calls()
            if self._work.is_busy and not self._should_stop:
                self._work.notice_abandoned()
                self._work.turn()
        self._is_closed = True  # from now on callers look after themselves; those before are in the inbox
        while self._fail_one():
            pass
        try:
            self._work.close()
        except BaseException as error:  # noqa: BLE001 - raised by `stop`
            self._failure = error

    def _take_calls(self) -> None:
        """Begin all calls that have arrived; if there is nothing else to do, wait for one."""
        while not self._should_stop:
            if not self._take_call(wait=not self._work.is_busy):
                return

    def _take_call(self, *, wait: bool) -> bool:  # a method, so that no variable keeps a call during the next wait
        try:
            call = self._inbox.get(block=wait)
        except queue.Empty:
            return False
        self._work.notice_abandoned()  # a caller that was interrupted, and calls again, finds nothing of its old call
        while self._work.is_leaving and not self._should_stop:
            self._work.turn()
        if call is None or call.is_abandoned:
            return True
        if self._should_stop:
            call.fail(RuntimeError("this engine has exited"))
        else:
            call.begin()
        return True

    def _fail_one(self) -> bool:
        try:
            call = self._inbox.get(block=False)
        except queue.Empty:
            return False
        if call is not None:
            call.fail(RuntimeError("this engine has exited"))
        return True
