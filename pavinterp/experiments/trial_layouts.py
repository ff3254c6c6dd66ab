"""Layouts of a trial: from a list of trials and the token of each stimulus to a prompt, and where it is tested.

A trial is its CSs side by side, what the layout writes between CS and US, the US, and what it writes after. Without a
US the trial is the same up to the US and then ends; without a CS it is what comes between, the US and the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pavinterp.theory.schedules import Trial

TEXTS = {"arrow": (" ->", ","), "colon": (":", ";"), "sentence": ("", "."), "line": ("", "\n")}
"""What comes between CS and US, and after the US: `A -> X,`, `A: X;`, `A X.`, and `A X`, one a line."""


@dataclass(frozen=True)
class Layout:
    """A way to write a trial.

    Attributes:
        name: of the layout.
        between: token ids between CS and US; none where the US follows the CS at once.
        after: token ids at the end of every trial.
    """

    name: str
    between: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def trial_length(self) -> int:
        """Tokens of a trial with one CS and a US: how long filler is."""
        return 2 + len(self.between) + len(self.after)


@dataclass(frozen=True)
class Prompt:
    """Trials as one sequence of tokens, the test at its end: its CSs, and what comes before the US.

    Attributes:
        tokens: ids.
        trials: those presented, in order; then the test, without a US.
        cs: by trial the positions of its CSs, as they are named in the trial.
        us: by trial the position of its US, -1 without one.
        tested: by trial the position whose next token is the US, if one comes; -1 for filler, and where nothing comes
            before a US alone. The last is the test, at the last position.
    """

    tokens: npt.NDArray[np.int64]
    trials: tuple[Trial, ...]
    cs: tuple[tuple[int, ...], ...]
    us: tuple[int, ...]
    tested: tuple[int, ...]


def lay_out(
    trials: Sequence[Trial],
    test: tuple[str, ...],
    stimuli: Mapping[str, int],
    layout: Layout,
    *,
    start: Sequence[int] = (),
    filler: Sequence[int] = (),
    seed: int = 0,
) -> Prompt:
    """The prompt of these trials and test.

    Args:
        trials: in order.
        test: CSs of the test.
        stimuli: token of each stimulus.
        layout: how a trial is written.
        start: ids in front of everything (BOS).
        filler: ids that filler takes one after the other, again from the first where there are too few.
        seed: of the order of CSs within compounds, drawn anew in each trial (and for its number and length alike in
            every group): what comes last before the US is no matter of the stimulus's name.

    Raises:
        ValueError: there is filler among the trials and none was given.
    """
    tokens, cs_at, us_at, tested, used = list(start), [], [], [], 0
    every = (*trials, Trial(test, None))
    for number, trial in enumerate(every):
        last = number == len(trials)
        places: dict[str, int] = {}
        us = before = -1
        if trial.filler and not last:
            if not len(filler):
                raise ValueError("filler among the trials and no tokens for it")
            words = layout.trial_length - len(layout.after)
            tokens += [int(filler[(used + i) % len(filler)]) for i in range(words)]
            used += words
        else:
            order = np.random.default_rng([seed, number, len(trial.cs)]).permutation(len(trial.cs))
            for place in order:
                places[trial.cs[place]] = len(tokens)
                tokens.append(stimuli[trial.cs[place]])
            tokens += layout.between
            before = len(tokens) - 1
            if trial.us is not None:
                us = len(tokens)
                tokens.append(stimuli[trial.us])
        if not last:
            tokens += layout.after
        cs_at.append(tuple(places[name] for name in trial.cs))
        us_at.append(us)
        tested.append(before)
    return Prompt(np.array(tokens, np.int64), every, tuple(cs_at), tuple(us_at), tuple(tested))
