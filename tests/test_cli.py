"""The command line end to end on the embedded model: what it writes, prints and returns; every kind of bad input."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import gpt2, model_folder

import pavinterp
from pavinterp import cli, options, store, terminal
from pavinterp.cache import alone, cache_root
from pavinterp.errors import UserError
from pavinterp.experiment_commands import EXPERIMENTS, FIRST_LOOK

SMALL = ("--context", "64", "--sequences", "8", "--tests", "8", "--layers", "0")
DEMO = Path(pavinterp.__file__).parent / "demo"
MANY_WORDS = "the quick brown fox jumps over the lazy dog and runs away from it again. " * 40


@dataclass
class Ended:
    """What a command printed and returned."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line in this process."""

    def run(*arguments: object) -> Ended:
        before = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as ended:
                cli.main([str(argument) for argument in arguments])
        finally:
            signal.signal(signal.SIGTERM, before)
        code = ended.value.code
        assert isinstance(code, int)
        printed = capsys.readouterr()
        return Ended(code, printed.out, printed.err)

    return run


def error_line(ended: Ended) -> str:
    """The one line of an error; progress lines before it are no errors."""
    assert "Traceback" not in ended.err
    lines = [line for line in ended.err.splitlines() if line.startswith("pavinterp: ")]
    assert len(lines) == 1, ended.err
    assert ended.err.endswith(lines[0] + "\n"), "the error is the last thing said"
    assert ended.out == ""
    return lines[0]


# --- What the commands do ---


def test_measure_writes_the_tables_where_it_says(command: Command, in_tmp: Path) -> None:
    ended = command("measure", *SMALL)
    assert ended.code == 0, ended.err
    assert os.listdir("reports") == ["demo"]
    assert {"heads.csv", "heads.parquet", "records.parquet", "manifest.json"} <= set(os.listdir("reports/demo"))
    assert not Path("reports/demo/index.html").exists()
    assert ended.out.splitlines()[-1] == os.path.join("reports", "demo")
    assert "certificate" in ended.out
    assert "linear-memory bound" in ended.out
    manifest = store.read_manifest(Path("reports/demo"))
    assert manifest["command"] == " ".join(["pavinterp", "measure", *SMALL])
    assert len(store.read_heads(Path("reports/demo"))) == 8


@pytest.mark.slow
def test_report_writes_pages_and_prints_where(command: Command, tmp_path: Path) -> None:
    ended = command("report", "demo", *SMALL, "--out", tmp_path / "mine")
    assert ended.code == 0, ended.err
    page = Path(ended.out.splitlines()[-1])
    assert page == tmp_path / "mine" / "index.html"
    assert page.is_file()
    assert len(list(page.parent.glob("heads/*.html"))) == 8
    assert os.listdir(tmp_path) == ["mine"]


def test_json_is_one_object_and_progress_goes_elsewhere(command: Command, tmp_path: Path) -> None:
    ended = command("measure", *SMALL, "--out", tmp_path / "mine", "--json")
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    assert result["folder"] == str(tmp_path / "mine")
    assert result["page"] is None
    assert result["certificate"]["largest"] <= result["certificate"]["tolerance"]
    assert result["arguments"]["tests"] == 8
    assert "loading demo" in ended.err


def test_the_main_job_opens_no_connection(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was asked for")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    ended = command("report", *SMALL, "--out", tmp_path / "mine")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["measure", "--pages", "0"], "--pages: measure writes no pages"),
        (["report", "--pages", "0,9"], "--pages 9: not among the layers that are measured"),
        (["report", "--layers", "0", "--pages", "0,1"], "--pages 1: not among the layers that are measured"),
        (["report", "--tests", "9" * 5000], "give a whole number of at least 1, or all"),
        (["report", "~nobody-of-that-name/x"], "no folder '~nobody-of-that-name/x'"),
    ],
)
def test_what_is_wrong_is_said_before_the_work(
    command: Command, tmp_path: Path, arguments: list[str], says: str
) -> None:
    ended = command(*arguments, "--out", tmp_path / "mine")
    assert ended.code == 2
    assert says in ended.err
    assert "sequences" not in ended.err
    assert os.listdir(tmp_path) == []


def test_text_with_nul_characters_is_no_text(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(("hello world " * 200).encode("utf-16-le"))
    ended = command("measure", "demo", "--corpus", path, "--out", tmp_path / "mine")
    assert ended.code == 2
    assert f"{path} is not text: a NUL character at character 1; if it is UTF-16" in ended.err


def test_quiet_says_nothing_but_the_result(command: Command, tmp_path: Path) -> None:
    ended = command("measure", *SMALL, "--out", tmp_path / "mine", "--quiet")
    assert (ended.code, ended.err) == (0, "")


def test_overwrite_replaces_an_earlier_run(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    assert command("measure", *SMALL, "--out", folder).code == 0
    assert command("measure", *SMALL, "--out", folder, "--overwrite", "--seed", 5).code == 0
    assert store.read_manifest(folder)["seed"] == 5
    assert os.listdir(tmp_path) == ["mine"]


def test_every_position_is_tested_on_request(command: Command, tmp_path: Path) -> None:
    ended = command("measure", *SMALL, "--tests", "all", "--out", tmp_path / "mine", "--json")
    assert json.loads(ended.out)["tests_per_sequence"] == "all"


def test_text_from_standard_input(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(MANY_WORDS.encode())))
    ended = command("measure", *SMALL, "--corpus", "-", "--out", tmp_path / "mine")
    assert ended.code == 0, ended.err


def test_verify_says_by_which_path_and_how_exactly(command: Command) -> None:
    ended = command("verify", "demo")
    assert ended.code == 0, ended.err
    assert "can be measured, by attention_interface" in ended.out
    assert "loads by the other path, transformer_lens, differ by" in ended.out
    assert len(ended.out.splitlines()) == 6 + 4
    result = json.loads(command("verify", "demo", "--json", "--layers", "1,3").out)
    assert result["passed"] is True
    assert result["future_safe"] is True
    assert [row["layer"] for row in result["layers"]] == [1, 3]
    assert result["largest"] <= result["tolerance"]


def test_verify_ends_with_3_where_a_model_cannot_be_measured_exactly(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pavinterp import verification

    real = verification.verify(pavinterp.load("demo"), layers=[0])
    monkeypatch.setattr(
        verification, "verify", lambda *_, **__: real | {"passed": False, "future_safe": False, "largest": 0.3}
    )
    ended = command("verify", "demo")
    assert ended.code == 3
    assert "cannot be measured exactly" in ended.out


def test_the_version(command: Command) -> None:
    assert command("--version").out == f"{pavinterp.__version__}\n"


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("report", "--help"), ("heads", "-h")])
def test_help_is_no_error(command: Command, arguments: tuple[str, ...]) -> None:
    ended = command(*arguments)
    assert (ended.code, ended.err) == (0, "")
    assert "Usage: pavinterp" in ended.out


# --- The table of heads ---


def test_heads_fit_a_narrow_terminal_line_by_line(command: Command, demo_folder: Path) -> None:
    ended = command("heads", demo_folder)
    lines = ended.out.splitlines()
    assert len(lines) == 32 + 3
    assert max(map(len, lines)) <= 80
    assert "effective" in lines[0]


def test_heads_sorted_by_a_column_and_cut(command: Command, demo_folder: Path) -> None:
    expected = store.read_heads(demo_folder).sort_values("induction_score", ascending=False).index[:3].tolist()
    ended = command("heads", demo_folder, "--sort", "induction_score", "--top", 3)
    assert "effective_load in associations; " in ended.err
    assert "95 % interval" in ended.err
    lines = ended.out.splitlines()
    assert [tuple(map(int, line.split()[:2])) for line in lines[-3:]] == expected
    assert "induction" in lines[0]
    assert "induction_score" not in terminal.SHOWN, "a column that was asked for is shown"


@pytest.mark.parametrize("column", ["layer", "head", "regime", "horizon_worst", "window", "effective_load_lo"])
def test_heads_can_be_sorted_by_any_column(command: Command, demo_folder: Path, column: str) -> None:
    ended = command("heads", demo_folder, "--sort", column)
    assert ended.code == 0, ended.err
    assert sum(line.strip()[:1].isdigit() for line in ended.out.splitlines()) == 32


def test_heads_as_csv_are_the_whole_table(command: Command, demo_folder: Path) -> None:
    table = pd.read_csv(io.StringIO(command("heads", demo_folder, "--csv").out))
    assert len(table) == 32
    assert table["effective_load"].tolist() == pytest.approx(store.read_heads(demo_folder)["effective_load"].tolist())


def test_heads_as_json_say_what_is_missing_or_endless(command: Command, demo_folder: Path) -> None:
    result = json.loads(command("heads", demo_folder, "--json", "--top", 2).out)
    assert [(row["layer"], row["head"]) for row in result["heads"]] == [(0, 0), (0, 1)]
    assert result["heads"][0]["window"] is None
    assert result["model"]["name"] == "demo"
    assert terminal.json_safe({"a": [float("inf"), float("-inf"), float("nan"), pd.NA]}) == {
        "a": ["inf", "-inf", None, None]
    }


def test_a_reader_that_goes_away_is_no_error(demo_folder: Path) -> None:
    script = f'set -o pipefail; "{sys.executable}" -m pavinterp heads "{demo_folder}" --csv | head -n 1'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("layer,head,")
    assert done.stderr == ""
    assert done.returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output_is_one_line(demo_folder: Path) -> None:
    with open("/dev/full", "w") as full:
        arguments = [sys.executable, "-m", "pavinterp", "heads", str(demo_folder), "--csv"]
        done = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("pavinterp: disk full")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_summary_that_cannot_be_printed_does_not_hide_the_run(in_tmp: Path) -> None:
    with open("/dev/full", "w") as full:
        arguments = [sys.executable, "-m", "pavinterp", "measure", *SMALL, "--quiet", "--out", "made"]
        done = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("pavinterp: the run is whole in made, but its summary cannot be printed here")
    assert len(done.stderr.splitlines()) == 1
    assert (in_tmp / "made" / "manifest.json").exists()


def test_ctrl_c_while_python_imports_is_one_line() -> None:
    """The signal comes at the first import that `pavinterp` makes of its own."""
    code = (
        "import os, signal, sys, builtins, importlib.abc\n"
        "class Stop(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from pavinterp.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr == "pavinterp: interrupted: nothing was written\n"


# --- Bad input: one line, exit 2, nothing left behind ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "No such command"),
        (["reprot"], "report"),
        (["report", "--colour", "red"], "--colour"),
        (["report", "--tests", "0"], "--tests 0"),
        (["report", "--tests", "-4"], "--tests -4"),
        (["report", "--tests", "few"], "or all"),
        (["report", "--tests", "1.5"], "--tests 1.5"),
        (["report", "--layers", ""], "--layers"),
        (["report", "--layers", "a"], "0,3,5-8"),
        (["report", "--layers", "5-2"], "5-2"),
        (["report", "--layers", "-1"], "--layers -1"),
        (["report", "--layers", "1,,2"], "1,,2"),
        (["report", "--context", "-5"], "--context"),
        (["report", "--context", "0"], "--context"),
        (["report", "--context", "many"], "--context"),
        (["report", "--sequences", "0"], "--sequences"),
        (["report", "--batch", "0"], "--batch"),
        (["report", "--seed", "-1"], "--seed"),
        (["report", "demo", "gpt2"], "gpt2"),
        (["heads"], "RUN"),
        (["heads", "nowhere"], "nowhere"),
        (["heads", "."], "manifest.json"),
        (["heads", ".", "--csv", "--json"], "choose one"),
        (["heads", ".", "--top", "0"], "--top"),
        (["verify"], "MODEL"),
        (["report", "--out", ""], "empty name"),
        (["report", "--out", "no/such/place"], "does not exist"),
        (["report", "--out", "."], "never replaced"),
        (["report", "--out", ".", "--overwrite"], "never replaced"),
    ],
)
def test_a_command_line_that_makes_no_sense(command: Command, in_tmp: Path, arguments: list[str], words: str) -> None:
    ended = command(*arguments)
    assert ended.code == 2
    assert words in error_line(ended)
    assert len(ended.err.splitlines()) == 1, "found before any work"
    assert os.listdir(in_tmp) == []


def test_an_unknown_column_is_answered_with_the_nearest(command: Command, demo_folder: Path) -> None:
    ended = command("heads", demo_folder, "--sort", "efective_load")
    assert ended.code == 2
    assert "did you mean effective_load?" in error_line(ended)


def test_a_damaged_run_is_one_line(command: Command, demo_folder: Path, tmp_path: Path) -> None:
    run = shutil.copytree(demo_folder, tmp_path / "run")
    (run / "heads.parquet").write_bytes(b"not parquet")
    ended = command("heads", run)
    assert ended.code == 2
    assert "heads.parquet cannot be read" in error_line(ended)


def tiny(folder: Path, kind: str) -> Path:
    """A model folder of a kind that cannot be measured, with the embedded model's tokenizer."""
    import torch
    import transformers as hf

    small = {"vocab_size": 2048, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    if kind == "encoder":
        hf.BertForMaskedLM(hf.BertConfig(**small, intermediate_size=16)).save_pretrained(folder)
    elif kind == "encoder-decoder":
        config = hf.T5Config(vocab_size=2048, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        hf.T5ForConditionalGeneration(config).save_pretrained(folder)
    elif kind == "no attention":
        config = hf.MambaConfig(vocab_size=2048, hidden_size=16, num_hidden_layers=1, state_size=4)
        hf.MambaForCausalLM(config).save_pretrained(folder)
    else:
        config = hf.GPT2Config(vocab_size=2048, n_embd=16, n_layer=2, n_head=2, n_positions=64)
        model = hf.GPT2LMHeadModel(config)
        if kind == "NaN":
            with torch.no_grad():
                model.transformer.h[1].attn.c_attn.weight[3, 4] = float("nan")
        model.save_pretrained(folder)
        if kind == "no weights":
            (folder / "model.safetensors").unlink()
        elif kind == "cut short":
            weights = (folder / "model.safetensors").read_bytes()
            (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    return folder


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("encoder", "encoder-only"),
        ("encoder-decoder", "encoder-decoder"),
        ("no attention", "without attention"),
        ("NaN", "h.1."),
        ("no weights", "weights"),
        ("cut short", ""),
    ],
)
def test_a_model_that_cannot_be_measured(command: Command, tmp_path: Path, kind: str, words: str) -> None:
    model = tiny(tmp_path / "model", kind)
    for arguments in (["measure", model, "--out", tmp_path / "out"], ["verify", model]):
        ended = command(*arguments)
        assert ended.code == 2, ended.err
        line = error_line(ended)
        assert words in line
        assert str(model) in line
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-person/no-such-model"], "no-such-person/no-such-model"),
        (["./no-such-folder"], "no-such-folder"),
        (["no-such-file.gguf"], "no-such-file.gguf"),
        (["empty"], "empty"),
        (["demo", "--device", "abacus"], "abacus"),
        (["demo", "--device", "cuda:99"], "cuda:99"),
        (["demo", "--dtype", "float8"], "float8"),
        (["demo", "--revision", "main"], "revision"),
        (["demo", "--corpus", "missing.txt"], "missing.txt"),
        (["demo", "--corpus", "empty.txt"], "empty.txt"),
        (["demo", "--corpus", "empty"], "empty"),
        (["demo", "--corpus", "binary.txt"], "binary.txt"),
        (["demo", "--corpus", "broken.jsonl"], "broken.jsonl"),
        (["demo", "--corpus", "short.txt"], "short.txt"),
        (["demo", "--context", "513"], "512"),
        (["demo", "--layers", "0,4"], "4"),
        (["demo", "--bos", "perhaps"], "perhaps"),
    ],
)
def test_a_model_or_text_that_cannot_be_had(command: Command, in_tmp: Path, arguments: list[str], words: str) -> None:
    Path("empty").mkdir()
    Path("empty.txt").write_text("")
    Path("short.txt").write_text("too short a text")
    Path("binary.txt").write_bytes(bytes(range(256)) * 20)
    Path("broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    before = sorted(os.listdir())
    ended = command("measure", *arguments)
    assert ended.code == 2, ended.err
    assert words in error_line(ended)
    assert sorted(os.listdir()) == before


def test_a_folder_that_exists_is_found_before_the_work(command: Command, demo_folder: Path) -> None:
    ended = command("report", "--out", demo_folder)
    assert ended.code == 2
    assert "--overwrite" in error_line(ended)
    assert len(ended.err.splitlines()) == 1


def test_memory_that_runs_out_names_the_knobs(command: Command, in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def exhausted(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", exhausted)
    ended = command("measure", *SMALL)
    assert ended.code == 2
    assert "--batch" in error_line(ended)
    assert os.listdir(in_tmp) == []


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, "disk full"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("division by zero"), 1, "internal error: ZeroDivisionError"),
    ],
    ids=["disk full", "Ctrl-C", "our fault"],
)
def test_nothing_half_written_is_left(
    command: Command, in_tmp: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(pd.DataFrame, "to_csv", interrupted)  # after the first files have been written
    ended = command("measure", *SMALL)
    assert ended.code == code
    assert words in error_line(ended)
    assert os.listdir(in_tmp) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_run_that_is_stopped_leaves_nothing_and_says_how_to_go_on(
    in_tmp: Path, number: signal.Signals, code: int, word: str
) -> None:
    arguments = [sys.executable, "-u", "-m", "pavinterp", "measure", "--tests", "all", "--batch", "1"]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    while "text sequences (" not in said:
        character = process.stderr.read(1)
        assert character, said
        said += character
    unfinished = cache_root() / "unfinished"
    while not list(unfinished.glob("*/*.part")):
        time.sleep(0.01)
    process.send_signal(number)
    said += process.stderr.read()
    assert process.wait() == code
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert re.fullmatch(rf"pavinterp: {word}: \d+ finished parts are kept, the same command goes on from there", last)
    assert os.listdir(in_tmp) == []


# --- Values of options ---


@given(st.sets(st.integers(0, 99_999), min_size=1))
def test_layers_round_trip(layers: set[int]) -> None:
    text = ",".join(map(str, layers))
    assert options.parse_layers(text) == sorted(layers)
    assert options.parse_layers(f"{text},{text}") == sorted(layers)


def test_layers_may_be_ranges() -> None:
    assert options.parse_layers("0,3,5-8") == [0, 3, 5, 6, 7, 8]
    assert options.parse_layers(" 2 , 4 - 5 ") == [2, 4, 5]
    assert options.parse_layers("3-3") == [3]
    assert options.parse_layers(None) is None


@given(st.text(max_size=20))
def test_any_text_for_layers_or_tests_is_read_or_refused(text: str) -> None:
    for parse in (options.parse_layers, options.parse_tests):
        with suppress(UserError):
            parse(text)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "demo"),
        ("gpt2", "gpt2"),
        ("meta-llama/Llama-3.2-1B", "llama-3.2-1b"),
        ("/models/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct.q4_1"),
        ("C:\\models\\Llama.GGUF", "llama"),
        ("./models/mine/", "mine"),
        ("../..", "model"),
        (" odd: name*?<>| ", "odd-name"),
        ("模型", "model"),
        ("x" * 300, "x" * 100),
    ],
)
def test_a_folder_is_named_after_its_model(model: str, name: str, in_tmp: Path) -> None:
    found = options.name_of(model)
    assert found == (in_tmp.parent.parent.name.lower() if model == "../.." else name)


def test_a_folder_of_here_is_named_after_itself(in_tmp: Path) -> None:
    (in_tmp / "Mine").mkdir()
    os.chdir("Mine")
    assert options.name_of(".") == "mine"


def test_needed_prints_heads_and_correlations(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "needed.csv"
    ended = command(
        "needed", "demo", "--layers", "1", "--heads", "3", "--context", "24", "--sequences", "8", "--csv", str(file)
    )
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert len(lines) == 1 + 3 + 2 + 8
    assert lines[0].split()[:4] == ["layer", "head", "needed_20", "needed_10"]
    assert "bootstrap over" in ended.err
    table = pd.read_csv(file)
    assert table["layer"].tolist() == [1, 1, 1]
    assert (table["needed_20"] <= table["needed_2"]).all()
    assert (table["needed_5_lo"] <= table["needed_5"]).all()
    told = json.loads(command("needed", "demo", "--layers", "1", "--heads", "3", "--context", "24", "--json").out)
    assert told["model"]["name"] == "demo"
    assert told["arguments"]["heads"] == 3
    assert told["certificate"]["largest"] <= 1e-5
    assert [head["layer"] for head in told["heads"]] == [1, 1, 1]
    again = command("needed", "demo", "--csv", str(file))
    assert (again.code, len(again.err.strip().splitlines())) == (2, 1)
    assert command("needed", "demo", "--heads", "0").code == 2


def test_budget_prints_heads_and_what_they_cost(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "budget.csv"
    small = ["--context", "16", "--sequences", "4", "--by", "load", "--layers", "1,2"]
    ended = command("budget", "demo", "--max-loss-increase", "0.1", *small, "--csv", str(file))
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["layer", "1", "2"]
    assert len(lines) == 3 + 2 + 4 + 2 + 6
    assert "limit 0.1" in ended.err
    assert "No intervals" in ended.err
    table = pd.read_csv(file)
    assert (table["budget"] <= table["most"]).all()
    told = json.loads(command("budget", "demo", "--max-loss-increase", "0.1", *small, "--json", "--renormalise").out)
    assert told["arguments"]["renormalise"] is True
    assert told["arguments"]["max_loss_increase"] == 0.1
    assert {row["method"] for row in told["methods"]} == {"load", "uniform", "window", "window_and_first"}
    assert len(told["heads"]) == 16
    assert command("budget", "demo", "--max-loss-increase", "0").code == 2
    assert command("budget", "demo", "--by", "size").code == 2


def test_propagate_prints_layers_gains_and_joint_errors(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "gains.csv"
    small = ["--context", "24", "--sequences", "8", "--strengths", "0.03,0.3", "--draws", "1"]
    ended = command("propagate", "demo", *small, "--csv", str(file))
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert len(lines) == (1 + 4) + (2 + 1 + 4) + (2 + 1 + 3) + (2 + 1 + 4)
    assert lines[0].split() == [
        "layer", "infidelity", "infidelity_theorem", "own_change", "gain", "end_gain", "linear_to",
    ]  # fmt: skip
    assert "Jacobian-vector products: final changes at strength 0.03 differ" in ended.err
    table = pd.read_csv(file)
    assert len(table) == 2 * 2 * 10
    assert (table["to"] >= table["layer"]).all()
    told = json.loads(command("propagate", "demo", *small, "--layers", "2", "--json").out)
    assert told["arguments"]["strengths"] == [0.03, 0.3]
    assert [row["layer"] for row in told["layers"]] == [2]
    assert {"heads", "calibration", "gain", "ends", "linearity", "witness", "joint"} <= set(told)
    assert told["first_order"] == "Jacobian-vector products"
    for wrong in ("0", "a", "0.1,-1", "nan"):
        ended = command("propagate", "demo", "--strengths", wrong)
        assert (ended.code, len(ended.err.strip().splitlines())) == (2, 1)


@pytest.mark.parametrize("words", [["condition", "MODEL"], ["report", "MODEL", "--with", "condition", "--out", "OUT"]])
def test_conditioning_writes_its_own_text(words, monkeypatch, capsys, tmp_path):
    """A first look takes fewer draws and paradigms, in a report too, and is handed no text, layers or context."""
    seen = []

    def experiment(model, **arguments):
        seen.append(arguments)
        raise UserError("enough")

    monkeypatch.setattr(pavinterp, "condition", experiment)
    model = str(model_folder(tmp_path / "model", gpt2(positions=64)))
    places = {"MODEL": model, "OUT": str(tmp_path / "out")}
    text = ["--context", "32", "--sequences", "2", "--layers", "0"] if words[0] == "report" else []
    with pytest.raises(SystemExit) as end:
        cli.main([*(places.get(word, word) for word in words), "--fast", "--seed", "3", *text])
    assert end.value.code == 2
    assert "enough" in capsys.readouterr().err
    assert len(seen) == 1
    paradigms = [getattr(one, "name", one) for one in seen[0]["paradigms"]]
    assert (seen[0]["draws"], paradigms, seen[0]["seed"]) == (40, FIRST_LOOK["condition"]["paradigms"], 3)
    assert not {"layers", "context", "sequences", "capture"} & set(seen[0])


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "condition"])
def test_a_first_look_takes_what_is_not_given(name, monkeypatch, capsys, tmp_path):
    seen = {}

    def experiment(model, text, **arguments):
        seen.update(arguments)
        raise UserError("enough")

    monkeypatch.setattr(pavinterp, EXPERIMENTS[name], experiment)
    model = str(model_folder(tmp_path / "model", gpt2(positions=64)))
    expected = FIRST_LOOK[name]
    for words, changed in (([], {}), (["--sequences", "9", "--context", "20"], {"sequences": 9, "context": 20})):
        with pytest.raises(SystemExit) as end:
            cli.main([name, model, "--fast", *words])
        assert end.value.code == 2
        assert capsys.readouterr().err.endswith("pavinterp: enough\n")
        at_most = {"context": 64} if "context" in expected else {}  # the model has no more positions
        for option, value in (expected | at_most | changed).items():
            assert seen[option] == value


def test_a_folder_that_another_process_writes_is_refused_before_the_work(command: Command, in_tmp: Path) -> None:
    with alone(in_tmp / "reports" / "demo"):
        ended = command("measure", *SMALL)
    assert ended.code == 2
    assert "reports/demo is being written by another process: wait for it" in error_line(ended)
    assert "text sequences" not in ended.err
