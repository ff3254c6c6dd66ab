"""Progress: bars on a terminal, one line per stage elsewhere."""

from __future__ import annotations

import io

import pytest

from pavinterp.progress import Bars, Lines, Progress, progress_to


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def two_stages(progress: Progress) -> None:
    with progress, progress.stage("loading demo"):
        pass
    with progress:
        for done in range(5):
            progress("text", done, 4)


def test_a_log_gets_one_line_per_stage() -> None:
    stream = io.StringIO()
    two_stages(progress_to(stream))
    first, second = stream.getvalue().splitlines()
    assert first.startswith("loading demo ... ")
    assert first.endswith(" s")
    assert second.startswith("text (4) ... ")
    assert second.endswith(" /s")


def test_a_stage_that_breaks_off_ends_its_line() -> None:
    stream = io.StringIO()
    with pytest.raises(RuntimeError), progress_to(stream) as progress:
        progress("text", 0, 4)
        raise RuntimeError
    assert stream.getvalue() == "text (4) ... stopped\n"


def test_a_terminal_gets_bars_with_rate_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    progress = progress_to(stream)
    assert isinstance(progress, Bars)
    two_stages(progress)
    assert "loading demo" in stream.getvalue()
    assert "4/4" in stream.getvalue()
    assert "/s" in stream.getvalue()


def test_a_bar_shows_the_time_left() -> None:
    from rich.progress import Progress as RichProgress

    from pavinterp.progress import steps_of

    now = 0.0
    bars = RichProgress(get_time=lambda: now)
    task = bars.add_task("text", total=100)
    for now in range(1, 11):  # noqa: B007 (get_time reads it)
        bars.update(task, advance=1)
    assert steps_of(bars.tasks[0]) == "10/100  1 /s  01:30 left"


def test_a_terminal_that_can_do_nothing_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress_to(Terminal()), Lines)


def test_quiet_says_nothing() -> None:
    stream = Terminal()
    two_stages(progress_to(stream, quiet=True))
    assert stream.getvalue() == ""


def test_work_goes_on_when_nobody_reads_its_progress() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    two_stages(progress_to(Gone()))
