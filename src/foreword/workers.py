"""Where a grid is computed: in this process, in several, or on a Ray cluster.

Each function maps `call` over `tasks` and yields (task, result) as the tasks are done, in any order. `call` and the
tasks go to other processes, so they can be pickled; `call` handles its own exceptions. A task whose process died
comes with a string that says so in place of a result.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from .errors import ForewordError

Task = TypeVar("Task")
Result = TypeVar("Result")
Done = Iterator[tuple[Task, Result | str]]


def in_this_process(call: Callable[[Task], Result], tasks: Sequence[Task], threads: int | None) -> Done:
    """One task after the other, here, with `threads` PyTorch threads or as many as there were."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        for task in tasks:
            yield task, call(task)
    finally:
        torch.set_num_threads(before)


def in_processes(
    call: Callable[[Task], Result], tasks: Sequence[Task], workers: int, threads: int, modules: Sequence[str]
) -> Done:
    """`workers` processes with `threads` PyTorch threads each; `modules` are worth importing once for all of them.

    At most `workers` tasks are in flight, so that a dead process leaves few suspects: each of them is then tried in a
    process of its own, and the one whose process dies again is to blame.
    """
    context = _context(modules)

    def pool(size: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(size, context, _start, (threads,))

    waiting = list(reversed(tasks))
    while waiting:
        flying: dict[Future[Result], Task] = {}
        suspects: list[Task] = []
        with _stopping(pool(workers)) as executor:
            while flying or (waiting and not suspects):
                while waiting and len(flying) < workers and not suspects:
                    task = waiting.pop()
                    try:
                        flying[executor.submit(call, task)] = task
                    except BrokenProcessPool:
                        suspects.append(task)
                done, _ = wait(flying, return_when=FIRST_COMPLETED)
                for future in done:
                    task = flying.pop(future)
                    try:
                        yield task, future.result()
                    except BrokenProcessPool:
                        suspects.append(task)
        for task in suspects:
            with _stopping(pool(1)) as alone:
                try:
                    yield task, alone.submit(call, task).result()
                except BrokenProcessPool:
                    yield task, "the worker process died: killed, perhaps for want of memory\n"


def on_ray(
    call: Callable[[Task], Result],
    tasks: Sequence[Task],
    workers: int,
    threads: int,
    resources: Mapping[str, float] | None,
) -> Done:
    """A Ray cluster, connected already or found or started by `ray.init()`; at most `workers` tasks in flight.

    `resources`: what one task asks for, by default as many CPUs as it has `threads`.
    """
    try:
        import ray
    except ImportError as error:
        raise ForewordError("the ray backend needs Ray: pip install ray, or use the processes backend") from error

    def remote(task: Task) -> Result:
        torch.set_num_threads(threads)
        return call(task)

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    on_cluster = ray.remote(remote).options(max_retries=0, **(resources or {"num_cpus": threads}))
    waiting = list(reversed(tasks))
    flying: dict[Any, Task] = {}
    while waiting or flying:
        while waiting and len(flying) < workers:
            task = waiting.pop()
            flying[on_cluster.remote(task)] = task
        done, _ = ray.wait(list(flying), num_returns=1)
        for reference in done:
            task = flying.pop(reference)
            try:
                yield task, ray.get(reference)
            except ray.exceptions.RayError as error:
                yield task, f"{error}\n"


def _context(modules: Sequence[str]) -> multiprocessing.context.BaseContext:
    """Never a fork of this process, whose threads may hold locks, but of a server that has done the imports."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *modules])
    return context


def _start(threads: int) -> None:
    """The first thing that a worker does."""
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:  # a killed parent takes its workers along
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def _stopping(executor: ProcessPoolExecutor) -> Iterator[ProcessPoolExecutor]:
    """The executor, whose processes end at once when the block is left by an exception."""
    try:
        yield executor
    except BaseException:
        for process in list((executor._processes or {}).values()):
            process.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)
