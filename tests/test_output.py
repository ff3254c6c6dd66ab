"""Output folders appear whole or not at all, and replace nothing but an earlier run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pavinterp.errors import UserError
from pavinterp.output import check_folder, is_run, new_folder


def make_run(folder: Path, content: str = "old") -> Path:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"pavinterp_version": "0.1.0"}))
    (folder / "heads.csv").write_text(content)
    return folder


def test_a_new_folder_appears_whole_with_its_parent_and_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "reports" / "gpt2"
    with new_folder(target) as folder:
        assert folder.parent == target.parent, "written on the same file system, so that the rename is atomic"
        assert not target.exists()
        (folder / "heads.csv").write_text("new")
    assert (target / "heads.csv").read_text() == "new"
    assert os.listdir(target.parent) == ["gpt2"]


def test_the_umask_decides_who_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with new_folder(tmp_path / "gpt2"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "gpt2").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), SystemExit(143)])
def test_nothing_is_left_where_writing_breaks_off(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), new_folder(tmp_path / "reports" / "gpt2") as folder:
        (folder / "heads.csv").write_text("half")
        raise error
    assert os.listdir(tmp_path) == []


def test_a_parent_that_was_there_before_stays(tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    with pytest.raises(RuntimeError), new_folder(tmp_path / "reports" / "gpt2"):
        raise RuntimeError
    assert os.listdir(tmp_path) == ["reports"]
    assert os.listdir(tmp_path / "reports") == []


def test_overwrite_puts_the_new_run_in_the_place_of_the_old(tmp_path: Path) -> None:
    target = make_run(tmp_path / "gpt2")
    (target / "examples.json").write_text("of the old run")
    with new_folder(target, overwrite=True) as folder:
        assert (target / "heads.csv").read_text() == "old", "the old run stands until the new one is whole"
        (folder / "heads.csv").write_text("new")
    assert os.listdir(tmp_path) == ["gpt2"]
    assert os.listdir(target) == ["heads.csv"]


@pytest.mark.parametrize("name", ["notes.md", "heads/marked.csv", "figures/mine.png", "sub/heads.csv"])
def test_overwrite_never_deletes_what_somebody_else_put_there(tmp_path: Path, name: str) -> None:
    target = make_run(tmp_path / "gpt2")
    (target / name).parent.mkdir(exist_ok=True)
    (target / name).write_text("weeks of work")
    with pytest.raises(UserError, match=f"holds {name.removesuffix('/heads.csv')}, which pavinterp did not write"):
        check_folder(target, overwrite=True)
    assert (target / name).read_text() == "weeks of work"


def test_the_folder_one_is_in_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_run(tmp_path / "gpt2")
    (target / "heads").mkdir()
    for here in (target, target / "heads"):
        monkeypatch.chdir(here)
        with pytest.raises(UserError, match="the folder you are in"):
            check_folder(target, overwrite=True)


def test_processes_that_overwrite_one_folder_at_once_leave_one_whole_run(tmp_path: Path) -> None:
    make_run(tmp_path / "gpt2")
    code = (
        "import json, sys; from pathlib import Path; from pavinterp.output import new_folder\n"
        "for turn in range(60):\n"
        "    with new_folder(Path(sys.argv[1]), overwrite=True) as folder:\n"
        "        (folder / 'heads.csv').write_text(sys.argv[2])\n"
        "        (folder / 'manifest.json').write_text(json.dumps({'pavinterp_version': sys.argv[2]}))\n"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "gpt2"), str(i)], stderr=subprocess.PIPE)
        for i in range(4)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors.decode()
    assert os.listdir(tmp_path) == ["gpt2"]
    version = json.loads((tmp_path / "gpt2" / "manifest.json").read_text())["pavinterp_version"]
    assert (tmp_path / "gpt2" / "heads.csv").read_text() == version


def test_overwrite_keeps_the_old_run_where_writing_breaks_off(tmp_path: Path) -> None:
    target = make_run(tmp_path / "gpt2")
    with pytest.raises(RuntimeError), new_folder(target, overwrite=True) as folder:
        (folder / "heads.csv").write_text("half")
        raise RuntimeError
    assert os.listdir(tmp_path) == ["gpt2"]
    assert (target / "heads.csv").read_text() == "old"


def test_overwrite_keeps_the_old_run_where_the_last_rename_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_run(tmp_path / "gpt2")
    rename = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Input/output"), new_folder(target, overwrite=True):
        pass
    assert os.listdir(tmp_path) == ["gpt2"]
    assert (target / "heads.csv").read_text() == "old"


KILLED = """
import os, sys, pavinterp.output as output
rename, after = output.Path.rename, int(sys.argv[2])
def counted(self, to):
    global after
    after -= 1
    if after < 0:
        os._exit(9)
    return rename(self, to)
output.Path.rename = counted
with output.new_folder(sys.argv[1], overwrite=True) as folder:
    (folder / "heads.csv").write_text("new")
"""


@pytest.mark.parametrize(("after", "holds"), [(0, "old"), (1, "old")], ids=["before", "between the renames"])
def test_what_a_killed_process_left_is_put_right(tmp_path: Path, after: int, holds: str) -> None:
    """Killed before the old run is moved away, or when it is and the new one is not yet in its place."""
    target = make_run(tmp_path / "gpt2")
    assert subprocess.run([sys.executable, "-c", KILLED, str(target), str(after)], check=False).returncode == 9
    assert any(".partial-" in name for name in os.listdir(tmp_path))
    check_folder(target, overwrite=True)
    assert os.listdir(tmp_path) == ["gpt2"]
    assert (target / "heads.csv").read_text() == holds


def test_only_what_pavinterp_left_is_put_right(tmp_path: Path) -> None:
    for name in (".gpt2.old-photos", ".gpt2.partial-notes", ".gpt2.old-77777", ".gpt2.partial-77777"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("years of work")
    before = sorted(os.listdir(tmp_path))
    check_folder(tmp_path / "gpt2")
    with new_folder(tmp_path / "gpt2"):
        pass
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "gpt2"])


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    with new_folder(tmp_path / "gpt2") as folder:
        (folder / "heads.csv").write_text("new")
        code = "import sys, pavinterp.output as output; output.check_folder(sys.argv[1])"
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "gpt2")], check=True)
        assert (folder / "heads.csv").read_text() == "new"
    assert (tmp_path / "gpt2" / "heads.csv").read_text() == "new"


def test_a_run_that_stands_there_says_how_it_was_made(tmp_path: Path) -> None:
    target = make_run(tmp_path / "gpt2")
    made = {"pavinterp_version": "0.1.0", "command": "pavinterp report gpt2 --context 512"}
    (target / "manifest.json").write_text(json.dumps(made))
    with pytest.raises(UserError, match=r"gpt2 exists \(made by `pavinterp report gpt2 --context 512`\): replace it"):
        check_folder(target)


def test_overwrite_through_a_symbolic_link_replaces_what_it_leads_to(tmp_path: Path) -> None:
    target = make_run(tmp_path / "disk" / "gpt2")
    (tmp_path / "gpt2").symlink_to(target)
    with new_folder(tmp_path / "gpt2", overwrite=True) as folder:
        (folder / "heads.csv").write_text("new")
    assert (tmp_path / "gpt2").is_symlink()
    assert (target / "heads.csv").read_text() == "new"


def test_a_run_that_appeared_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists"), new_folder(tmp_path / "gpt2"):
        make_run(tmp_path / "gpt2", "somebody else's")
    assert (tmp_path / "gpt2" / "heads.csv").read_text() == "somebody else's"


def test_two_processes_of_one_number_do_not_share_a_folder(tmp_path: Path) -> None:
    with new_folder(tmp_path / "gpt2") as one, new_folder(tmp_path / "gpt3") as other:
        (tmp_path / f".gpt2.partial-{os.getpid()}-1").mkdir()
        assert one != other
        with new_folder(tmp_path / "deep" / "gpt2"):
            pass


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "manifest",
    [None, "", "{}", "[1]", '{"name": "somebody else\'s"}', '["pavinterp_version"]', b"\xff\xfe"],
    ids=["none", "empty", "object", "list", "another tool's", "list with the key", "not text"],
)
def test_what_is_not_a_run_is_never_replaced(tmp_path: Path, manifest: str | bytes | None, overwrite: bool) -> None:
    target = tmp_path / "thesis"
    target.mkdir()
    (target / "chapter.tex").write_text("years of work")
    if manifest is not None:
        (target / "manifest.json").write_bytes(manifest if isinstance(manifest, bytes) else manifest.encode())
    assert not is_run(target)
    with pytest.raises(UserError, match="never replaced"):
        check_folder(target, overwrite)
    with pytest.raises(UserError, match="never replaced"), new_folder(target, overwrite):
        pass
    assert (target / "chapter.tex").read_text() == "years of work"


def test_an_empty_folder_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a pavinterp run"):
        check_folder(tmp_path, overwrite=True)


def test_what_is_wrong_is_found_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "gpt2")
    (tmp_path / "file").write_text("")
    for path, words in [
        (run, "--overwrite"),
        (tmp_path / "file", "exists and is not a folder"),
        (tmp_path / "file" / "gpt2", "is not a folder"),
        (tmp_path / "file" / "deep" / "gpt2", "is not a folder"),
        (tmp_path / "no" / "such" / "gpt2", "does not exist"),
        (tmp_path / ("x" * 300), "cannot write"),
        ("", "empty name"),
    ]:
        with pytest.raises(UserError, match=words) as raised:
            check_folder(path)
        assert "\n" not in str(raised.value)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="not a pavinterp run"):
        check_folder(".", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["file", "gpt2"], "looking leaves nothing behind"


@pytest.mark.parametrize(("number", "words"), [(errno.EACCES, "no permission"), (errno.EROFS, "no permission")])
def test_a_place_that_cannot_be_written_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(self: Path, *arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=words):
        check_folder(tmp_path / "gpt2")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    with pytest.raises(UserError, match="disk full"), new_folder(tmp_path / "reports" / "gpt2") as folder:
        (folder / "heads.csv").write_text("half")
        raise OSError(number, os.strerror(number))
    assert os.listdir(tmp_path) == []


def in_own_mounts(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script that may mount: the mounts are its own and end with it. Skips where that is not allowed."""
    unshare = shutil.which("unshare")
    allowed = unshare and subprocess.run([unshare, "-rm", "true"], capture_output=True, check=False).returncode == 0
    if not allowed:
        pytest.skip("mounting needs Linux and the permission to make a mount namespace")
    command = ["unshare", "-rm", "sh", "-ec", script, "sh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


WRITE = """
import sys, pavinterp.output as output
try:
    with output.new_folder(sys.argv[1]) as folder:
        (folder / "records").write_bytes(bytes(1 << 20))
except output.UserError as error:
    print(error)
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=100k tmpfs "$1"; "$2" -c "$3" "$1/gpt2"; ls -A "$1"'
    done = in_own_mounts(script, str(tmp_path), sys.executable, WRITE)
    assert done.stdout.startswith("disk full"), done.stderr
    assert len(done.stdout.splitlines()) == 1, "nothing is left on the disk"


def test_a_disk_that_is_really_read_only(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o ro tmpfs "$1"; "$2" -c "$3" "$1/gpt2"'
    done = in_own_mounts(script, str(tmp_path), sys.executable, WRITE)
    assert "no permission to write there" in done.stdout, done.stderr
