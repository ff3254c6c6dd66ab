"""Report pages: complete, self-contained, right in their numbers, and safe whatever stands in text and vocabulary."""

from __future__ import annotations

import base64
import hashlib
import math
import re
import time
import unicodedata
from html.parser import HTMLParser
from types import SimpleNamespace

import pandas as pd
import pytest
import synthetic

from pavinterp.plots.words import number
from pavinterp.report import write
from pavinterp.report.missing import reason
from pavinterp.report.order import in_order
from pavinterp.report.page import typeset
from pavinterp.report.passage import LEVELS, level
from pavinterp.report.strings import clipped, token, visible
from pavinterp.report.summary import picks, sentences, summarise

ALLOWED_TAGS = set(
    re.findall(
        r"\w+",
        "a article b bdi body caption circle cite code dd details div dl dt em figcaption figure footer h1 h2 h3 head "
        "header html i input label li main mark meta nav ol option output p path pre rect script section select span "
        "strong style sub summary sup svg table tbody td text th thead title tr tspan ul var",
    )
)


class Page(HTMLParser):
    """Tags, links, texts and scripts of a page, as a browser's parser sees them."""

    def __init__(self, path):
        super().__init__(convert_charrefs=True)
        self.tags, self.links, self.ids, self.attributes = [], [], [], []
        self.inside, self.script, self.style, self.text, self.policy = "", "", "", "", ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.inside = tag if tag in ("script", "style") else self.inside
        for name, value in attrs:
            self.attributes.append((tag, name, value))
            if name in ("href", "src", "xlink:href"):
                self.links.append(value)
            if name == "id":
                self.ids.append(value)
            if name == "content" and ("http-equiv", "Content-Security-Policy") in attrs:
                self.policy = value

    def handle_endtag(self, tag):
        self.inside = "" if tag == self.inside else self.inside

    def handle_data(self, data):
        if self.inside:
            setattr(self, self.inside, getattr(self, self.inside) + data)
        else:
            self.text += data


@pytest.fixture(scope="module")
def run():
    return synthetic.run(4, 8, group=2, hostile=True)


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    (folder / "heads.csv").write_text("layer,head\n", encoding="utf-8")
    assert write(run, folder) == folder / "index.html"
    return folder


@pytest.fixture(scope="module")
def pages(folder):
    return {path.relative_to(folder).as_posix(): Page(path) for path in sorted(folder.rglob("*.html"))}


def test_every_head_has_a_page(run, folder):
    names = {f"L{layer:02d}H{head:02d}.html" for layer, head in run.heads().index}
    assert {p.name for p in (folder / "heads").iterdir()} == names
    assert {p.name for p in (folder / "figures").iterdir()} == {"load_map.svg", "load_ranking.svg", "load_by_depth.svg"}


def test_links_resolve_and_nothing_is_loaded(folder, pages):
    for name, page in pages.items():
        here = (folder / name).parent
        for link in page.links:
            path, _, anchor = link.partition("#")
            target = (here / path).resolve() if path else folder / name
            assert target.is_file(), (name, link)
            assert target.is_relative_to(folder.resolve()), (name, link)
            if anchor:
                assert anchor in pages[target.relative_to(folder.resolve()).as_posix()].ids, (name, link)
        assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags), name
        assert "url(" not in page.style
        assert "@import" not in page.style
    for path in folder.rglob("*.svg"):
        assert not re.search(r"(href|src)\s*=", path.read_text(encoding="utf-8"))


def test_steps_lead_through_all_heads(run, pages):
    name, seen = "heads/L00H00.html", []
    while name:
        seen.append(name)
        onward = [v for tag, key, v in pages[name].attributes if (tag, key) == ("a", "href") and "#" not in v]
        steps = [link for link in onward if link.startswith("L")]
        later = [link for link in steps if f"heads/{link}" > name]
        name = f"heads/{later[0]}" if later else ""
        assert "../index.html" in onward
    assert len(seen) == len(run.heads())


def test_policy_allows_the_pages_own_style_and_script_only(pages):
    for name, page in pages.items():
        rules = dict(rule.split(" ", 1) for rule in page.policy.split("; "))
        assert rules["default-src"] == "'none'"
        assert rules["style-src"] == f"'{sha256(page.style)}'", name
        expected = f"'{sha256(page.script)}'" if name == "index.html" else "'none'"
        assert rules["script-src"] == expected, name
        assert not [a for a in page.attributes if a[1] == "style" or a[1].startswith("on")], name


def sha256(text):
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_hostile_strings_are_shown_and_not_run(folder, pages):
    for name, page in pages.items():
        assert page.tags.count("script") == (name == "index.html"), name
        assert set(page.tags) <= ALLOWED_TAGS, (name, set(page.tags) - ALLOWED_TAGS)
        assert "alert" not in page.script
        raw = (folder / name).read_text(encoding="utf-8")
        hidden = {c for c in raw if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")} - {"\n"}
        assert not hidden, (name, hidden)
    text = "".join(page.text for page in pages.values())
    for shown in (
        "<script>document.title='pwned'</script>",
        "<img src=x onerror=alert(1)>",
        "&lt;b&gt; &amp;",
        "⟨NUL⟩⟨BEL⟩⟨ESC⟩[31m",
        "⟨U+202E⟩desrever⟨U+202C⟩",
        "⟨U+200B⟩⟨U+2066⟩zero⟨U+FEFF⟩",
        "⟨U+D800⟩lone",
        "{{ 7*7 }}",
        "⟨empty⟩",
        "↵↵⇥",
        "a midsummer night's dream <i>",
    ):
        assert shown in text, shown
    assert "49" not in re.findall(r"\]\]>(\S+)", text)
    assert "tiny</title><script>alert(1)</script>" in pages["index.html"].text


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (" plain text", " plain text"),
        ("a\nb\r\tc", "a↵b⟨CR⟩⇥c"),
        ("\x7f\x85\x9b", "⟨DEL⟩⟨U+0085⟩⟨U+009B⟩"),
        ("\u2028\u00a0\u3000", "⟨U+2028⟩⟨U+00A0⟩⟨U+3000⟩"),
        ("\ue000\U000e0041\ufe0f\u3164", "⟨U+E000⟩⟨U+E0041⟩⟨U+FE0F⟩⟨U+3164⟩"),
        ("\u0301a", "◌\u0301a"),
        ("é ש 漢 🙂", "é ש 漢 🙂"),
    ],
)
def test_visible(raw, shown):
    assert visible(raw) == shown


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("d_k and load_growth", "d<sub>k</sub> and load_growth"),
        ("(sum_j c_tj)^2 / sum_j c_tj^2", "(Σ<sub>j</sub> c<sub>tj</sub>)² / Σ<sub>j</sub> c<sub>tj</sub>²"),
        ("||a_t* v_* W_O||^2", "‖a<sub>t*</sub> v<sub>*</sub> W<sub>O</sub>‖²"),
        ("E[q q^T], 95 % <b>", "E[q q<sup>T</sup>], 95&nbsp;% &lt;b&gt;"),
    ],
)
def test_typeset(text, html):
    assert typeset(text) == html


def test_piled_marks_do_not_reach_other_lines():
    assert sum(unicodedata.category(c) == "Mn" for c in visible("a" + "\u0301" * 50)) == 3


def test_token_and_clipped():
    assert token(" the") == "·the"
    assert token("   ") == "···"
    assert token("") == "⟨empty⟩"
    assert token(" two words ") == "·two words·"
    assert len(token("x" * 400)) == 32
    assert clipped("abcdef", 4) == "abc…"
    assert clipped("abcdef", 4, keep="end") == "…def"


def test_first_sentences_carry_the_runs_numbers(run, pages):
    heads = run.heads()
    summary = summarise(heads)
    above = int((heads["effective_load"] > heads["capacity_worst"]).sum())
    sure = int((heads["effective_load_lo"] > heads["capacity_worst"]).sum())
    found, against, measured = sentences(summary, run.manifest)
    assert "8 passages of up to 512 tokens from 16 documents, and all 32 attention heads" in measured
    assert f"typically {heads['effective_load'].median():.1f} of them in the median head" in found
    assert f"{above} of 31 heads lie above the first bound ({sure} of them with their whole 95 % interval)" in against
    assert "recalls 4.5 associations" in against
    assert "33 on average" in against
    text = flat(pages["index.html"].text)
    for sentence in (found, against, measured):
        assert flat(sentence) in text
    assert "linear-memory bound" in text
    assert "over its capacity" not in text


def flat(text):
    return " ".join(text.split())


def test_picks_are_the_extremes(run):
    heads = run.heads()
    found = {pick.what: pick.name for pick in picks(heads)}
    layer, head = heads["induction_score"].idxmax()
    assert found["highest induction score"] == f"L{layer:02d}H{head:02d}"


def test_table_of_heads(run, folder):
    raw = (folder / "index.html").read_text(encoding="utf-8")
    table = raw[raw.index('<table id="heads">') :].split("</table>")[0]
    rows = re.findall(r'<tr data-regime="(.*?)">(.*?)</tr>', table, re.DOTALL)
    assert [regime for regime, _ in rows] == list(run.heads()["regime"])
    loads = [re.findall(r"<td.*?>(.*?)</td>", body)[2] for _, body in rows]
    assert loads == [number(x) for x in run.heads()["effective_load"]]
    horizons = [re.findall(r"<td.*?>(.*?)</td>", body)[11].split("<span>")[0] for _, body in rows]
    for shown, value in zip(horizons, run.heads()["horizon_worst"], strict=True):
        assert (shown == "∞") == math.isinf(value)
        assert (shown == "&gt; 10 × context") == (math.isfinite(value) and value > 5120)
    fidelities = [re.findall(r"<td.*?>(.*?)</td>", body)[7] for _, body in rows]
    for shown, (_, head) in zip(fidelities, run.heads().iterrows(), strict=True):
        value, low, high = (head[f"fidelity{end}"] for end in ("", "_lo", "_hi"))
        assert shown == ("–" if math.isnan(value) else f"{value:.2f}<span> [{low:.2f}, {high:.2f}]</span>")
    assert {len(re.findall(r"\[.*?\]", body)) for _, body in rows} <= {0, 17, 18, 19}


def test_glossary_defines_every_column(run, pages):
    page = pages["index.html"]
    columns = [c for c in run.heads().columns if not c.endswith(("_lo", "_hi"))]
    assert set(columns) <= set(page.ids)
    for text in run.heads().attrs["descriptions"].values():
        assert flat(re.sub("<.*?>", "", typeset(text)).replace("&#39;", "'").replace("&lt;", "<")) in flat(page.text)


def test_shared_cs_are_counted_once(pages):
    assert "32 heads read 16 KV heads" in pages["index.html"].text
    assert "Shared by L01H02, L01H03: count it once." in pages["heads/L01H03.html"].text
    assert "1, shared by 2 heads" in pages["heads/L01H03.html"].text


def test_head_page_has_all_numbers(run, pages):
    row, text = run.heads().loc[(1, 3)], pages["heads/L01H03.html"].text
    names = [c for c in run.heads().columns if f"{c}_lo" in run.heads().columns]
    for name in names:
        assert name in text
    assert f"{row['fidelity']:.3f}" in text
    assert "128 positions" in text
    assert "full attention" in pages["heads/L00H03.html"].text
    assert "Largest response" in text.replace("largest", "Largest")
    assert "the test itself" in "".join(page.text for page in pages.values())


def test_many_tests_are_thinned_and_this_is_said(tmp_path):
    write(synthetic.run(1, 2, sequences=16, tests=64, examples=0), tmp_path)
    page = Page(tmp_path / "heads" / "L00H00.html").text
    assert re.search(r"500 of \d+ tests are drawn", page)
    assert re.search(r"From \d+ tests of 16 sequences, weighted", page)


def test_undefined_head_says_why(run, pages):
    layer, head = run.heads().index[run.heads()["effective_load"].isna()][0]
    text = pages[f"heads/L{layer:02d}H{head:02d}.html"].text
    assert "This head has no load" in text
    assert "responses are zero or not finite" in text
    assert f"no load (L{layer:02d}H{head:02d})" in pages["index.html"].text


def test_without_intervals_every_page_says_why(tmp_path):
    run = synthetic.run(2, 3, clusters=5, hostile=False)
    write(run, tmp_path)
    index, head = Page(tmp_path / "index.html").text, Page(tmp_path / "heads" / "L00H01.html").text
    for text in (index, head):
        assert "No intervals: 5 documents" in text
    assert "95 % interval does" not in index
    assert "open without an interval" in head
    assert "nan" not in index.lower().replace("dominant", "")


def test_run_without_details(tmp_path):
    run = synthetic.run(2, 3)
    run.details = SimpleNamespace(tests=pd.DataFrame(), spectra=pd.DataFrame(), examples=[])
    write(run, tmp_path)
    text = Page(tmp_path / "heads" / "L01H02.html").text
    assert "examples were left out of this run" in text
    assert "no test of this head has a finite load" in text


def test_some_layers_of_a_large_model(tmp_path):
    run = synthetic.run(3, 4, hostile=False)
    table = run.heads().rename(index={0: 7, 1: 99, 2: 110}, level="layer")
    run.table, run.manifest["model"]["heads"] = table, 1200
    run.details = SimpleNamespace(tests=pd.DataFrame(), spectra=pd.DataFrame(), examples=[])
    write(run, tmp_path)
    assert (tmp_path / "heads" / "L110H03.html").is_file()
    assert "12 of its 1,200 attention heads" in flat(Page(tmp_path / "index.html").text)


def test_reasons():
    assert reason("fidelity", 0.5, 0.4, "95 %") == ""
    assert reason("fidelity", math.nan, math.nan, "95 %").startswith("undefined")
    assert reason("fidelity", 0.5, math.nan, "No intervals: one document.") == "No intervals: one document."
    assert reason("induction_score", math.nan, math.nan, "") == "not measured on repeated random tokens"


def test_columns_in_reading_order():
    assert in_order(["new", "d_eff", "effective_load", "other"]) == ["effective_load", "d_eff", "new", "other"]


def test_shades_fall_by_thirds():
    assert [level(s, 0.9) for s in (0.9, 0.31, 0.29, 0.0999, 0.004, 0.003, 0.0)] == [5, 5, 4, 3, 1, 0, 0]
    assert level(0.0, 0.0) == 0
    assert LEVELS == 5


def test_one_page_holds_little(folder):
    sizes = [path.stat().st_size for path in (folder / "heads").iterdir()]
    assert max(sizes) < 60_000


@pytest.mark.slow
def test_a_thousand_heads_in_time_and_space(tmp_path):
    run = synthetic.run(32, 32, group=8, d_k=128, sequences=16, tests=64, examples=4, hostile=False)
    started = time.process_time()
    write(run, tmp_path)
    assert time.process_time() - started < 120
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.*")) < 60e6
    assert (tmp_path / "index.html").stat().st_size < 3e6
