"""Sequences, BOS, rounds and hashes; repeated random tokens."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import one_line
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from pavinterp import stimuli
from pavinterp.corpora import Corpus, corpus
from pavinterp.errors import UserError
from pavinterp.stimuli import check_stimuli, ordinary_token_ids, repeated_random_tokens, token_hash, tokenise

PROSE = "The quick brown fox jumps over the lazy dog, and the dog, being lazy, lets it; no one knows why it does so. "
BOS, EOS = "<|begin|>", "<|end|>"


def make_tokenizer(template: str | None = f"{BOS} $A", **tokens: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE like GPT-2's; `template` says what it adds by itself around a text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([PROSE], trainer)
    if template is not None:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=[(BOS, 0), (EOS, 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=64, **(tokens or {"bos_token": BOS, "eos_token": EOS})
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def plain_ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def test_sequences_are_exactly_a_context_and_never_straddle(tokenizer):
    texts = [PROSE * 3, "Short.", PROSE.upper() * 2]
    found = tokenise(corpus(texts), tokenizer, context=16)
    bos = tokenizer.bos_token_id
    assert found.kind == "text"
    assert found.bos_added
    assert found.document_names == ["text[0]", "text[2]"]  # the short one gave none
    whole = [plain_ids(tokenizer, texts[0]), plain_ids(tokenizer, texts[2])]
    seen = [0, 0]
    for ids, d in zip(found.tokens, found.document, strict=True):
        assert ids.dtype == np.int64
        assert ids.tolist() == [bos, *whole[d][15 * seen[d] : 15 * (seen[d] + 1)]]
        assert len(ids) == 16
        seen[d] += 1
    assert seen == [len(ids) // 15 for ids in whole]
    dropped = sum(len(ids) % 15 for ids in whole) + len(plain_ids(tokenizer, "Short."))
    assert found.dropped_tokens == dropped


def test_rounds_go_over_documents_first(tokenizer):
    texts = [PROSE * 9, PROSE * 2, PROSE.upper() * 9]
    every = tokenise(corpus(texts), tokenizer, context=32)
    rounds = [np.flatnonzero(every.document == d) for d in range(3)]
    order = [(turn, d) for d, places in enumerate(rounds) for turn, _ in enumerate(places)]
    assert every.document.tolist() == [d for _, d in sorted(order)]
    assert tokenise(corpus(texts), tokenizer, context=32, sequences=3).document.tolist() == [0, 1, 2]
    for count in range(1, len(every.tokens) + 2):
        some = tokenise(corpus(texts), tokenizer, context=32, sequences=count)
        assert len(some.tokens) == min(count, len(every.tokens))
        assert len(some.document_names) == min(count, 3)
        uses = np.bincount(some.document)
        assert uses.max() - uses[uses < np.bincount(every.document)[: len(uses)]].min(initial=uses.max()) <= 1


def test_seed_draws_the_documents_where_there_are_more_than_asked(tokenizer):
    texts = corpus([f"{i} {PROSE}" for i in range(40)])
    draws = [tokenise(texts, tokenizer, context=16, sequences=5, seed=seed) for seed in (0, 0, 1)]
    assert draws[0].token_hash == draws[1].token_hash != draws[2].token_hash
    assert draws[0].document_names == draws[1].document_names != draws[2].document_names
    for draw in draws:
        assert draw.document.tolist() == [0, 1, 2, 3, 4]
        places = [int(name[5:-1]) for name in draw.document_names]
        assert places == sorted(places)


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.read, self.calls = tokenizer, 0, 0

    def __call__(self, text, **options):
        self.read, self.calls = self.read + len(text), self.calls + 1
        return self.tokenizer(text, **options)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


def test_reading_stops_when_there_are_enough(tokenizer):
    counting = Counting(tokenizer)
    tokenise(corpus([PROSE] * 500), counting, context=16, sequences=20)
    assert counting.calls <= 20 + 3  # and the probes for BOS
    long = corpus([PROSE * 20_000])
    counting = Counting(tokenizer)
    few = tokenise(long, counting, context=64, sequences=12)
    assert counting.read < 70_000
    assert len(few.tokens) == 12


def test_partly_read_text_gives_the_tokens_of_the_whole(tokenizer):
    text = corpus([(PROSE * 2000)[:200_000]])
    every = tokenise(text, tokenizer, context=1024)
    some = tokenise(text, tokenizer, context=1024, sequences=len(every.tokens) - 1)
    assert token_hash(some.tokens) == token_hash(every.tokens[:-1])


@pytest.mark.parametrize("filler", [PROSE, "jumps", "漢字とかな", "🙂 \n\n\n", "x" * 300 + " "])
def test_tokens_near_a_cut_wait_for_the_text_after_it(tokenizer, monkeypatch, filler):
    text = (filler * 9000)[:9000]
    whole = plain_ids(tokenizer, text)
    for cut in range(1500, 1530):
        monkeypatch.setattr(stimuli, "_FIRST_READ", cut)
        begun = stimuli._Document(text, tokenizer, [], whole=False).tokens(1).tolist()
        assert 0 < len(begun) < len(whole)
        assert begun == whole[: len(begun)]


def test_bos_policies(tokenizer):
    text, first = corpus([PROSE * 2]), plain_ids(tokenizer, PROSE)[:15]
    by_itself = make_tokenizer()
    without = make_tokenizer(None)
    for bos, one, starts in [
        ("auto", by_itself, True),
        ("always", by_itself, True),
        ("never", by_itself, False),
        ("auto", without, False),
        ("always", without, True),
        ("never", without, False),
    ]:
        found = tokenise(text, one, context=16, bos=bos)
        assert found.bos == bos
        assert found.bos_added is starts
        assert all((ids[0] == one.bos_token_id) is np.bool_(starts) for ids in found.tokens)
        assert found.tokens[0][1 if starts else 0 :][:15].tolist() == first


def test_eos_is_never_added(tokenizer):
    text = corpus([PROSE * 2])
    expected = tokenise(text, tokenizer, context=16)
    both = tokenise(text, make_tokenizer(f"{BOS} $A {EOS}"), context=16)
    assert both.token_hash == expected.token_hash
    end_only = tokenise(text, make_tokenizer(f"$A {EOS}"), context=16)
    assert not end_only.bos_added
    assert end_only.token_hash == tokenise(text, tokenizer, context=16, bos="never").token_hash
    # One token for both ends, added at the end: not to be taken for BOS.
    same = make_tokenizer(f"$A {BOS}", bos_token=BOS, eos_token=BOS)
    assert not tokenise(text, same, context=16).bos_added


def test_a_python_tokenizer_that_adds_eos():
    one = ByT5Tokenizer()  # bytes, `</s>` at the end, no BOS; not a fast one
    found = tokenise(corpus(["ab</s>" * 8]), one, context=16)
    assert not found.bos_added
    assert one.decode(found.tokens[0]) == "ab</s>ab</s>ab</"
    assert not set(one.all_special_ids) & set(np.concatenate(found.tokens).tolist())
    assert not repeated_random_tokens(one, length=16, sequences=1).bos_added


def test_always_needs_a_bos_token():
    for one in (make_tokenizer(None, eos_token=EOS), ByT5Tokenizer()):
        with pytest.raises(UserError, match="--bos always needs a tokenizer with a BOS token") as error:
            tokenise(corpus([PROSE]), one, context=16, bos="always")
        one_line(error)


def test_special_tokens_in_the_text_are_plain_text(tokenizer):
    text = f"{PROSE}{BOS}{EOS} {EOS}{PROSE}"
    for bos, special in (("auto", 1), ("never", 0)):
        found = tokenise(corpus([text]), tokenizer, context=16, bos=bos)
        for ids in found.tokens:
            assert np.isin(ids, tokenizer.all_special_ids).sum() == special
    joined = np.concatenate(tokenise(corpus([text]), tokenizer, context=16, bos="never").tokens)
    assert BOS in tokenizer.decode(joined)


def test_the_tokenizer_stays_as_it_was_and_says_nothing(tokenizer, caplog, capfd):
    one = make_tokenizer()
    backend = one.backend_tokenizer
    backend.enable_truncation(8, stride=2)
    backend.enable_padding(pad_id=1, pad_token=EOS, length=4)
    before = (backend.truncation, backend.padding, backend.encode_special_tokens)
    found = tokenise(corpus([PROSE * 9]), one, context=128)  # beyond model_max_length
    repeated_random_tokens(one, length=16)
    assert (backend.truncation, backend.padding, backend.encode_special_tokens) == before
    assert found.token_hash == tokenise(corpus([PROSE * 9]), tokenizer, context=128).token_hash
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_text_shorter_than_one_context(tokenizer):
    longest = len(plain_ids(tokenizer, PROSE))
    with pytest.raises(
        UserError, match=rf"shorter than one context: .* text\[1\], has {longest} tokens .*lower --context"
    ) as error:
        tokenise(corpus(["Short.", PROSE, "Short."]), tokenizer, context=512, sequences=2)
    one_line(error)
    assert len(tokenise(corpus([PROSE]), tokenizer, context=longest, bos="never").tokens) == 1
    with pytest.raises(UserError, match=f"needs {longest + 1} besides BOS"):
        tokenise(corpus([PROSE]), tokenizer, context=longest + 2)


def test_ready_ids_keep_their_own_length():
    rows = [np.arange(20), np.arange(7), np.arange(8), np.arange(40)]
    found = tokenise(corpus(rows), None, context=16)
    assert [len(ids) for ids in found.tokens] == [16, 8, 16, 16]
    assert found.document_names == ["tokens[0]", "tokens[2]", "tokens[3]"]
    assert found.document.tolist() == [0, 1, 2, 2]
    assert found.dropped_tokens == 4 + 7 + 8
    assert found.short_documents == 1  # the one of 7
    assert not found.bos_added
    with pytest.raises(UserError, match="text shorter than one context"):
        tokenise(corpus(np.arange(15)), None, context=16)
    assert len(tokenise(corpus(np.arange(16)), None, context=16).tokens) == 1


def test_ready_ids_and_bos(tokenizer):
    bos = tokenizer.bos_token_id
    rows = [[bos, *range(10, 30)], list(range(30, 50))]
    as_they_are = tokenise(corpus(rows), tokenizer, context=10)
    assert as_they_are.tokens[0][:2].tolist() == [bos, 10]
    assert not as_they_are.bos_added
    assert tokenise(corpus([row[:10] for row in (rows[0], rows[0])]), tokenizer, context=10).bos_added
    always = tokenise(corpus(rows), tokenizer, context=10, bos="always")
    assert [ids[:2].tolist() for ids in always.tokens] == [[bos, 10], [bos, 30], [bos, 19], [bos, 39]]
    assert always.bos_added
    with pytest.raises(UserError, match="--bos always needs"):
        tokenise(corpus(rows), None, context=10, bos="always")


def test_short_documents_are_counted(tokenizer):
    found = tokenise(corpus(["Short.", PROSE, "Short.", PROSE]), tokenizer, context=16)
    assert found.short_documents == 2
    assert found.document_names == ["text[1]", "text[3]"]


def test_stimuli_that_a_model_cannot_read(tokenizer):
    good = tokenise(corpus([PROSE]), tokenizer, context=16)
    size = len(tokenizer)
    check_stimuli(good, size, 16)
    check_stimuli(good, size, None)

    def with_tokens(*tokens):
        return replace(good, tokens=list(tokens), document=np.zeros(len(tokens), np.int64))

    for wrong, positions, message in [
        (good, 15, r"sequence 0 of the stimuli has 16 tokens; .* at least 8 and has 15 positions"),
        (with_tokens(np.arange(7)), None, "sequence 0 of the stimuli has 7 tokens"),
        (with_tokens(np.arange(9), np.full(9, size)), None, r"sequence 1 of the stimuli: token id \d+ at position 0"),
        (with_tokens(np.full(9, -1)), None, "token id -1"),
        (with_tokens(), None, "stimuli of 0 sequences"),
        (with_tokens([1] * 9), None, "sequence 0 of the stimuli is no vector"),
        (with_tokens(np.ones(9)), None, "sequence 0 of the stimuli is no vector"),
        (replace(good, document=np.zeros(0, np.int64)), None, "with 0 document indices"),
        (repeated_random_tokens(tokenizer, length=16), None, "repeated random tokens"),
    ]:
        with pytest.raises(UserError, match=message) as error:
            check_stimuli(wrong, size, positions)
        one_line(error)


def test_ids_beyond_the_vocabulary(tokenizer):
    rows = [list(range(10)), [*range(9), 5000]]
    with pytest.raises(
        UserError, match=r"tokens\[1\]: token id 5000 at position 9 is out of range .*0 to \d+"
    ) as error:
        tokenise(corpus(rows), tokenizer, context=10)
    one_line(error)
    assert tokenise(corpus(rows), tokenizer, context=10, vocabulary_size=5001).tokens
    with pytest.raises(UserError, match=r"\(the vocabulary's are 0 to 99\)"):
        tokenise(corpus([PROSE]), tokenizer, context=10, vocabulary_size=100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 7}, "context must be a whole number of at least 8, got 7"),
        ({"context": 16, "sequences": 0}, "sequences must be a whole number of at least 1, got 0"),
        ({"context": "16"}, "context must be a whole number of at least 8, got '16'"),
        ({"context": 16.0}, "context must be a whole number"),
        ({"context": 16, "sequences": True}, "sequences must be a whole number of at least 1, got True"),
        ({"context": 16, "seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"context": 16, "seed": None}, "seed must be a whole number"),
        ({"context": 16, "bos": None}, "bos must be one of auto, always, never, got None"),
        ({"context": 16, "bos": "maybe"}, "bos must be one of auto, always, never, got 'maybe'"),
    ],
)
def test_arguments_out_of_range(tokenizer, options, message):
    with pytest.raises(UserError, match=message) as error:
        tokenise(corpus([PROSE]), tokenizer, **options)
    one_line(error)


def test_corpora_that_cannot_be_tokenised(tokenizer):
    with pytest.raises(UserError, match="mixes texts and token ids"):
        tokenise(Corpus("mine", [("a", PROSE), ("b", np.arange(9))]), tokenizer, context=16)
    with pytest.raises(UserError, match="the model has no tokenizer"):
        tokenise(corpus([PROSE]), None, context=16)
    with pytest.raises(UserError, match="is empty"):
        tokenise(Corpus("mine", []), tokenizer, context=16)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=8),
    st.integers(8, 24),
    st.none() | st.integers(1, 30),
    st.integers(0, 3),
)
def test_every_token_is_used_once_or_dropped(lengths, context, sequences, seed):
    starts = np.concatenate([[0], np.cumsum(lengths)])
    documents = [(str(i), np.arange(a, b)) for i, (a, b) in enumerate(pairwise(starts))]
    try:
        found = tokenise(Corpus("ids", documents), None, context=context, sequences=sequences, seed=seed)
    except UserError:
        assert len(lengths) == 1 or max(lengths) < 8
        return
    used = np.concatenate(found.tokens)
    assert len(used) == len(set(used.tolist()))
    assert len(used) + found.dropped_tokens == sum(lengths)
    assert sequences is None or len(found.tokens) <= sequences
    for ids, d in zip(found.tokens, found.document, strict=True):
        number = int(found.document_names[d])
        assert starts[number] <= ids[0]
        assert ids[-1] < starts[number + 1]
        assert np.all(np.diff(ids) == 1)


def test_hash_depends_on_ids_lengths_and_order():
    a, b = np.array([1, 2, 3]), np.array([4])
    hashes = [token_hash(t) for t in ([a, b], [b, a], [np.array([1, 2]), np.array([3, 4])], [np.arange(1, 5)], [])]
    assert len(set(hashes)) == 5
    assert all(h.startswith("sha256:") and len(h) == 71 for h in hashes)
    # Fixed: manifests written earlier must stay comparable.
    assert token_hash([a, b]) == "sha256:d1be102d58563b68d8f72a233b05f28692f1146c0db18c02a2aa8923d15763c9"


# --- repeated random tokens ---


@pytest.mark.parametrize(("length", "bos"), [(33, "auto"), (32, "auto"), (32, "never"), (33, "never"), (33, "always")])
def test_repeated_random_tokens(tokenizer, length, bos):
    found = repeated_random_tokens(tokenizer, length=length, sequences=5, bos=bos, seed=3)
    again = repeated_random_tokens(tokenizer, length=length, sequences=5, bos=bos, seed=3)
    assert found.token_hash == again.token_hash
    assert found.token_hash != repeated_random_tokens(tokenizer, length=length, sequences=5, bos=bos, seed=4).token_hash
    assert found.kind == "repeated_random_tokens"
    assert found.bos_added is (bos != "never")
    assert found.document.tolist() == [0, 1, 2, 3, 4]
    assert len(set(found.document_names)) == 5
    assert len({ids.tobytes() for ids in found.tokens}) == 5
    for ids in found.tokens:
        assert len(ids) == length
        if found.bos_added:
            assert ids[0] == tokenizer.bos_token_id
            ids = ids[1:]
        period = (len(ids) + 1) // 2
        assert len(set(ids[:period].tolist())) == period
        assert ids[period:].tolist() == ids[: len(ids) - period].tolist()
        assert not np.isin(ids, tokenizer.all_special_ids).any()


def test_fewer_sequences_are_the_first_of_more(tokenizer):
    few, many = (repeated_random_tokens(tokenizer, length=32, sequences=n) for n in (2, 6))
    assert token_hash(many.tokens[:2]) == few.token_hash


def test_special_and_added_tokens_are_left_out():
    one = make_tokenizer()
    one.add_tokens(["added"])
    ordinary = ordinary_token_ids(one)
    assert len(ordinary) == len(one) - 3
    assert not {one.bos_token_id, one.eos_token_id, one.convert_tokens_to_ids("added")} & set(ordinary.tolist())


def test_a_vocabulary_size_in_place_of_a_tokenizer():
    found = repeated_random_tokens(40, length=80, sequences=2)
    assert not found.bos_added
    assert sorted(found.tokens[0][:40].tolist()) == list(range(40))
    with pytest.raises(UserError, match="--bos always needs"):
        repeated_random_tokens(40, length=80, bos="always")


def test_vocabulary_too_small(tokenizer):
    with pytest.raises(
        UserError, match="need 100 different ones and the vocabulary has 33; lower the length to 66"
    ) as error:
        repeated_random_tokens(33, length=200)
    one_line(error)
    most = 2 * len(ordinary_token_ids(tokenizer)) + 1
    assert len(repeated_random_tokens(tokenizer, length=most, sequences=1).tokens[0]) == most
    with pytest.raises(UserError, match=f"lower the length to {most}"):
        repeated_random_tokens(tokenizer, length=most + 1)
    with pytest.raises(UserError, match="length must be a whole number of at least 8, got 4"):
        repeated_random_tokens(33, length=4)


def test_import_brings_no_heavy_package():
    heavy = "{'torch', 'transformers', 'tokenizers', 'pandas', 'pyarrow', 'datasets', 'scipy'}"
    code = f"import sys, pavinterp.corpora, pavinterp.stimuli; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
