"""How far a long run is: bars with rate and remaining time on a terminal, one line per stage elsewhere, or nothing.

A progress is a function of (stage, steps done, steps in all), called with 0 when a stage begins and with all of them
when it ends: what `pavinterp.measure(progress=...)` takes. Stages follow one another.

    with progress_to() as progress:
        run = pavinterp.measure("demo", progress=progress)
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import Task


class Progress:
    """Shows nothing; what shows something derives from it."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`done` of the `total` steps of a stage are finished."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the stream tidy, also where a stage was broken off."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage of one step: the block."""
        self(name, 0, 1)
        yield
        self(name, 1, 1)


def progress_to(stream: IO[str] | None = None, *, quiet: bool = False) -> Progress:
    """The progress that suits a stream: bars on a terminal, lines in a log, a pipe or a notebook, nothing if quiet.

    Args:
        stream: where to write; None is standard error.
        quiet: show nothing.
    """
    stream = sys.stderr if stream is None else stream
    if quiet:
        return Progress()
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        return Bars(stream)
    return Lines(stream)


class Lines(Progress):
    """One line per stage: its name and size when it begins, its time and rate when it ends."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self.current: str | None = None
        self.began = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self.current:
            self._break_off()
            self.current, self.began = stage, time.perf_counter()
            self._write(f"{stage} ... " if total == 1 else f"{stage} ({total:,}) ... ")
        if done >= total:
            seconds = time.perf_counter() - self.began
            rate = f", {total / seconds:.3g} /s" if total > 1 and seconds > 0 else ""
            self._write(f"{seconds:.1f} s{rate}\n")
            self.current = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._break_off()

    def _break_off(self) -> None:
        if self.current is not None:
            self._write("stopped\n")
            self.current = None

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):  # nobody reads the progress any more: no reason to stop the work
            pass


class Bars(Lines):
    """One bar per stage: steps done, rate, time gone and time left. A stage of one step gets a line as in a log.

    (What such a stage waits for may have bars of its own, as downloads do, and two live displays garble each other.)
    """

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(stream)
        self.bars: RichProgress | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if total == 1:
            super().__call__(stage, done, total)
            return
        if stage != self.current or self.bars is None:
            self._break_off()
            self.current, self.bars = stage, rich_bars(self.stream)
            self.bars.start()
            self.bars.add_task(stage, total=total)
        self.bars.update(self.bars.task_ids[0], completed=done)
        if done >= total:
            self.bars.stop()
            self.current, self.bars = None, None

    def _break_off(self) -> None:
        if self.bars is None:
            super()._break_off()
        else:
            self.bars.stop()
            self.current, self.bars = None, None


def rich_bars(stream: IO[str]) -> RichProgress:
    """A rich progress with our columns, which fit in 80 characters."""
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class Steps(ProgressColumn):
        """`12/64  5.2 /s  0:10 left`."""

        def render(self, task: Task) -> Text:
            return Text(steps_of(task))

    description = TextColumn("{task.description}", markup=False)
    return RichProgress(
        description, BarColumn(bar_width=16), TimeElapsedColumn(), Steps(), console=Console(file=stream)
    )


def steps_of(task: Task) -> str:
    """`12/64  5.2 /s  0:10 left` of a rich task."""
    parts = [f"{task.completed:,.0f}/{task.total or 0:,.0f}"]
    speed = task.finished_speed or task.speed
    if speed:
        parts.append(f"{speed:.3g} /s")
    if not task.finished and task.time_remaining is not None:
        seconds = int(task.time_remaining)
        hours = f"{seconds // 3600}:" if seconds >= 3600 else ""
        parts.append(f"{hours}{seconds // 60 % 60:02d}:{seconds % 60:02d} left")
    return "  ".join(parts)
