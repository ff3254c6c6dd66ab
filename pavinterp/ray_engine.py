"""Jobs on the workers of a Ray cluster: shares of each, then what puts them together; lost workers are replaced."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from pavinterp.errors import UserError
from pavinterp.exits import ending
from pavinterp.jobs import Job, Loaded, perform, share
from pavinterp.progress import Progress

LOSSES = 3  # times that a worker is replaced, and that a task is given to another one
Task = tuple[Job, tuple[int, int] | None]  # a share of a job, or (None) what puts its shares together
STAGE = "shares and reports of all models"


class Worker:
    """One process of the cluster: it keeps the model it has loaded for the shares that follow."""

    def __init__(self, threads: int) -> None:
        import torch

        from pavinterp.command_steps import quiet_libraries

        quiet_libraries()
        torch.set_num_threads(threads)
        self.loaded = Loaded()

    def do(self, job: Job, shard: tuple[int, int] | None) -> str | None:
        """A share of a job, or (None) all that is left of it; returns the line that says what went wrong, or None."""
        try:
            if shard is None:
                perform(job, Progress(), self.loaded)
            else:
                share(job, shard, Progress(), self.loaded)
        except Exception as error:
            return ending(error)[0]
        return None


def on_ray(
    jobs: Sequence[Job], progress: Progress, *, workers: int | None = None, shards: int | None = None
) -> Iterator[tuple[Job, str | None]]:
    """Do jobs on the cluster that `RAY_ADDRESS` names, or on a local one of this machine's cores.

    Every worker must see the jobs' folders, and have the same packages. A worker has one GPU where the cluster has
    any, and its part of a machine's cores. One that is lost is replaced, and goes on with the batches that its share
    has left: a share's finished batches are files.

    Args:
        jobs: each with a folder of parts of its own.
        progress: told shares and reports done of all.
        workers: how many; None is one for each GPU, or one for each machine.
        shards: shares of a job; None is four for each worker.

    Yields:
        each job as it ends, with None or the line that says what went wrong.

    Raises:
        UserError: Ray is not there, or no cluster answers.
    """
    with _cluster() as ray:
        crew = _workers(ray, workers)
        shards = shards or 4 * len(crew)
        tasks = [(job, (i, shards)) for job in jobs for i in range(1, shards + 1)]
        left = {id(job): shards for job in jobs}
        waiting: deque[Task] = deque(tasks)
        failed: set[int] = set()
        busy: dict[Any, tuple[int, Job, tuple[int, int] | None]] = {}
        models: dict[int, Any] = {}  # by worker, the options of the model that it has
        done, total = 0, len(jobs) * (shards + 1)
        progress(STAGE, 0, total)
        while waiting or busy:
            for number in set(range(len(crew))) - {worker for worker, _, _ in busy.values()}:
                if not waiting:
                    break
                task = _taken(waiting, models.get(number))
                models[number] = task[0].options
                busy[crew[number].do.remote(*task)] = (number, *task)
            try:
                ready, _ = ray.wait(list(busy), num_returns=1)
            except KeyboardInterrupt as error:
                error.add_note("what the workers have finished is kept, the same command goes on from there")
                raise
            number, job, shard = busy.pop(ready[0])
            try:
                wrong = ray.get(ready[0])
            except ray.exceptions.RayError as error:
                wrong = f"its worker was lost {LOSSES + 1} times ({type(error).__name__}): is there memory enough?"
            done += 1
            if wrong is not None and id(job) not in failed:
                failed.add(id(job))
                dropped = [task for task in waiting if task[0] is job]
                waiting = deque(task for task in waiting if task[0] is not job)
                done += len(dropped) + (shard is not None)  # and what would put it together
                yield job, wrong
            elif wrong is None and shard is None:
                yield job, None
            elif id(job) not in failed:
                left[id(job)] -= 1
                if left[id(job)] == 0:
                    waiting.appendleft((job, None))
            progress(STAGE, done, total)


def _taken(waiting: deque[Task], loaded: Any) -> Task:
    """Takes a task out of those that wait: one of the model that the worker has loaded, if there is any."""
    task = next((task for task in waiting if task[0].options == loaded), waiting[0])
    waiting.remove(task)
    return task


@contextmanager
def _cluster() -> Iterator[Any]:
    """The ray module, connected; a local cluster ends with the block."""
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise UserError("--engine ray: Ray is not installed: pip install 'pavinterp[ray]'") from None
    address = os.environ.get("RAY_ADDRESS")
    own = {} if address else {"include_dashboard": False}
    was_there = ray.is_initialized()
    try:
        if not was_there:
            if address and (at := re.fullmatch(r"(?:ray://)?([^/:]+):(\d+)", address)):
                socket.create_connection((at[1], int(at[2])), timeout=5).close()  # Ray itself asks for minutes
            with _our_signals():
                ray.init(logging_level="ERROR", log_to_driver=False, **own)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        where = os.environ.get("RAY_ADDRESS", "this machine")
        raise UserError(f"--engine ray: no cluster at {where} ({str(error).splitlines()[0]:.150})") from error
    try:
        yield ray
    finally:
        if not was_there:
            ray.shutdown()


@contextmanager
def _our_signals() -> Iterator[None]:
    """Ray puts handlers of its own in the place of those that end a command by a line; put them back."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        with suppress(ValueError):  # not in the main thread, which alone may handle signals
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


def _workers(ray: Any, wanted: int | None) -> list[Any]:
    """Actors, as many as wanted, with their GPUs and cores."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    cores = int(sum(node["CPU"] for node in nodes))
    number = wanted or gpus or len(nodes)
    most = gpus or cores
    if number > most:
        what = "GPUs" if gpus else "cores"
        raise UserError(f"--workers {number}: the cluster has {most} {what}: one worker needs one")
    each = -(-number // len(nodes))  # workers on the fullest machine
    threads = max(1, int(min(node["CPU"] for node in nodes)) // each)
    actor = ray.remote(Worker).options(
        num_cpus=threads, num_gpus=1 if gpus else 0, max_restarts=LOSSES, max_task_retries=LOSSES
    )
    return [actor.remote(threads) for _ in range(number)]
