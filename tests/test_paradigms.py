"""Paradigms that come with pavinterp: each is complete and fair to its control; and reading a user's file."""

from __future__ import annotations

from collections import Counter

import pytest

from pavinterp.errors import UserError
from pavinterp.paradigms import ORDER, builtin, load
from pavinterp.theory.schedules import trials

NAMED_IN_THE_DOCS = {
    "acquisition", "extinction", "reversal", "savings", "spontaneous_recovery", "latent_inhibition", "overshadowing",
    "blocking", "unblocking", "conditioned_inhibition", "second_order", "sensory_preconditioning", "generalisation",
    "discrimination", "partial_reinforcement", "contingency", "capacity",
}  # fmt: skip


def test_every_classic_paradigm_is_there_under_its_name():
    assert set(builtin()) >= NAMED_IN_THE_DOCS
    assert tuple(builtin()) == ORDER
    for name, paradigm in builtin().items():
        assert paradigm.name == name
        assert any(character.isdigit() for character in paradigm.source)  # a year


@pytest.mark.parametrize("name", ORDER)
def test_groups_are_equally_long_and_show_the_us_that_is_compared_equally_often(name):
    paradigm = builtin()[name]
    shown = [trials(paradigm, group.name, 0) for group in paradigm.groups]
    assert len({len(order) for order in shown}) == 1
    # in these the number of USs is itself what differs
    if name not in {"unblocking", "partial_reinforcement", "partial_reinforcement_extinction", "contingency"}:
        counts = [Counter(trial.us for trial in order) for order in shown]
        assert len({count["X" if name != "capacity" else "X1"] for count in counts}) == 1


def test_the_pair_that_capacity_tests_stands_in_the_same_places_whatever_the_load():
    paradigm = builtin()["capacity"]
    for seed in range(5):
        places = {
            tuple(i for i, trial in enumerate(trials(paradigm, group.name, seed)) if trial.cs == ("A1",))
            for group in paradigm.groups
        }
        assert len(places) == 1
    loads = [len({trial.cs for trial in trials(paradigm, group.name, 0) if trial.cs}) for group in paradigm.groups]
    assert loads == [32, 1, 2, 4, 8, 16]


def test_a_users_file_is_a_paradigm(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nabout = "x"\nsource = "me"\ntest = "A"\nresponse = "X"\npredicts = "higher"\n'
        '[groups]\nexperimental = ["A -> X x8"]\ncontrol = ["B -> X x8"]\n'
    )
    assert load(path) == load(str(path))
    assert load(path).name == "mine"
    assert load("blocking") is builtin()["blocking"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'name = "x"\nname = "y"\n',
            "not TOML (Cannot overwrite a value (at line 2, column 11)): write lines such as",
        ),
        (b"name = 3\n", 'mine.toml: name: write a text, name = "..."'),
        (b"\xff\xfe", "not UTF-8: save it as UTF-8"),
    ],
)
def test_a_wrong_file_is_named_with_what_to_do(tmp_path, content, message):
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no paradigm 'bloking': name one of acquisition, .* or a \.toml file"):
        load("bloking")
    with pytest.raises(UserError, match=r"cannot read .*none\.toml: No such file or directory"):
        load(tmp_path / "none.toml")
