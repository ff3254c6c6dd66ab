"""Each head's strongest associations, decoded: tests in their text, CSs by strength, USs as the tokens they promote."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pavinterp.capture.bridge_attention import original
from pavinterp.capture.call import AttentionCall, trials, working_dtype
from pavinterp.capture.output_projection import output_weight, write_factor
from pavinterp.capture.paths import capture_for, forward
from pavinterp.measures.load import Load
from pavinterp.models import ModelHandle
from pavinterp.norms import Norms, norm_gain
from pavinterp.sampling import sample_tests
from pavinterp.stimuli import Stimuli
from pavinterp.sweep import weighted_median
from pavinterp.trials import Trials

LONGEST = 200  # characters of a token
LARGEST = 3  # examples a head chosen by the size of the response, beside one of typical load
ASSOCIATIONS = 6
PROMOTED = 5
WINDOW = 48  # tokens of text shown before a test
AROUND = 4  # tokens of text shown on each side of a CS


def examples(
    handle: ModelHandle,
    stimuli: Stimuli,
    norms: Norms,
    *,
    tests: int | None,
    layers: set[int] | None,
    seed: int,
    sequences: int = 2,
) -> list[dict[str, Any]]:
    """Up to four telling tests of each head, from the first `sequences` sequences of the text.

    Three are the tests with the largest response among those with different targets; one has the load
    nearest to the head's median there. All are singled out, which the report says.

    Returns:
        One dict an example: layer, head, sequence, document, position, effective_load, fidelity,
        response_norm, why, window_start, tokens, strengths (a_tj of the shown tokens), associations.
    """
    unembed = Unembedding(handle, norms)
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for i in range(min(sequences, len(stimuli.tokens))):
        tokens = torch.from_numpy(stimuli.tokens[i]).to(handle.device)
        positions, weights = sample_tests(len(tokens), tests, np.random.default_rng([seed, i, True]))
        strings = token_strings(handle, stimuli.tokens[i])

        def on_layer(
            call: AttentionCall,
            i: int = i,
            tokens: Tensor = tokens,
            positions: np.ndarray = positions,
            weights: np.ndarray = weights,
            strings: list[str] = strings,
        ) -> None:
            w_o = output_weight(call.projection, call.queries.shape[1], call.values.shape[-1])
            dtype = working_dtype(call)
            index = torch.from_numpy(positions).to(tokens.device)
            weight = torch.from_numpy(weights).to(tokens.device, dtype)
            one = trials(call, 0, tokens, index, weight, write_factor(w_o, dtype), seed)
            numbers = Load()(one)
            for head in range(one.heads):
                chosen = _of_head(one, head, w_o[head].to(dtype), strings, numbers)
                for example in chosen:
                    example |= {"sequence": i, "document": stimuli.document_names[int(stimuli.document[i])]}
                found.setdefault((call.layer, head), []).extend(chosen)

        with capture_for(handle, on_layer, layers):
            forward(handle, tokens[None])
    chosen = {key: _best(found[key]) for key in sorted(found)}
    for layer in sorted({layer for layer, _ in chosen}):
        unembed.decode(layer, [e for key, examples in chosen.items() if key[0] == layer for e in examples])
    return [example for examples in chosen.values() for example in examples]


def _best(candidates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of several sequences' candidates: the largest responses, and the first typical one."""
    largest = sorted((e for e in candidates if e["why"] == "largest response"), key=lambda e: -e["response_norm"])
    return largest[:LARGEST] + [e for e in candidates if e["why"] == "typical load"][:1]


def _of_head(
    one: Trials,
    head: int,
    w_o: Float[Tensor, "d_v width"],
    strings: list[str],
    numbers: dict[str, Tensor],
) -> list[dict[str, Any]]:
    load, norm = numbers["effective_load"][head], numbers["response_norm"][head]
    eligible = torch.isfinite(load) & (one.tests >= 8)  # a test needs a little text before it to be read
    if not bool(eligible.any()):
        return []
    chosen: list[tuple[int, str]] = []
    targets: set[int] = set()
    for t in torch.argsort(norm.masked_fill(~eligible, -1.0), descending=True).tolist():
        target = int(one.target[head, t])
        if eligible[t] and target not in targets and len(targets) < LARGEST:
            targets.add(target)
            chosen.append((t, "largest response"))
    middle = weighted_median(load[eligible][None], one.weights[eligible])  # what the record is, but for the start
    typical = int(torch.where(eligible, (load.log() - middle.log()).abs(), float("inf")).argmin())
    chosen.append((typical, "typical load"))
    return [_example(one, head, t, why, w_o, strings, numbers) for t, why in chosen]


def _example(
    one: Trials,
    head: int,
    t: int,
    why: str,
    w_o: Float[Tensor, "d_v width"],
    strings: list[str],
    numbers: dict[str, Tensor],
) -> dict[str, Any]:
    """One example; its USs are still the writes themselves, to be decoded with the rest of the layer's."""
    position = int(one.tests[t])
    contribution = one.contributions[head, t]
    share = contribution / contribution.sum()
    top = torch.topk(share[: position + 1], min(ASSOCIATIONS, position + 1)).indices
    top = top[share[top] > 0.005]
    uss = one.values[head // one.group, top]
    writes = (uss if one.gate is None else uss * one.gate[head, t]) @ w_o
    start = max(0, position - WINDOW)
    return {
        "layer": one.layer,
        "head": head,
        "position": position,
        "effective_load": float(numbers["effective_load"][head, t]),
        "fidelity": float(numbers["fidelity"][head, t]),
        "response_norm": float(numbers["response_norm"][head, t]),
        "why": why,
        "window_start": start,
        "tokens": strings[start : position + 1],
        "strengths": [round(x, 5) for x in one.strengths[head, t, start : position + 1].tolist()],
        "associations": [
            {
                "position": j,
                "token": strings[j],
                "before": "".join(strings[max(0, j - AROUND) : j]),
                "after": "".join(strings[j + 1 : j + 1 + AROUND]),
                "strength": float(one.strengths[head, t, j]),
                "share": float(share[j]),
                "write": writes[i],
            }
            for i, j in enumerate(top.tolist())
        ],
    }


def token_strings(handle: ModelHandle, tokens: np.ndarray) -> list[str]:
    """Each token as text; tokens that are part of a character show the tokenizer's own symbol.

    Cut after LONGEST characters: a vocabulary may hold tokens of megabytes, and pages repeat each many times.
    """
    if handle.tokenizer is None:
        return [f"[{i}]" for i in tokens.tolist()]
    strings = handle.tokenizer.batch_decode([[i] for i in tokens.tolist()], clean_up_tokenization_spaces=False)
    raw = handle.tokenizer.convert_ids_to_tokens(tokens.tolist())
    whole = [r if "�" in s or s == "" else s for s, r in zip(strings, raw, strict=True)]
    return [s if len(s) <= LONGEST else f"{s[:LONGEST]}…" for s in whole]


class Unembedding:
    """Direct effect of a write to the residual stream on the logits, up to the norms' scales.

    A write `w` promotes token `i` by `(w * gain) . U_i`: the gain of the final norm is folded in, and that of a norm
    on the write itself, their scales (the same for all tokens) are left out. Norms that centre do so here too.
    """

    def __init__(self, handle: ModelHandle, norms: Norms) -> None:
        self.handle = handle
        head: Any = handle.model.get_output_embeddings()
        weight: Any = None if head is None else original(head).weight
        self.weight: Tensor | None = None if weight is None else weight.detach()
        self.norms = norms

    def decode(self, layer: int, examples: list[dict[str, Any]]) -> None:
        """Put, in place of each association's write, the tokens it promotes and suppresses most, strongest first."""
        associations = [association for example in examples for association in example["associations"]]
        up, down = self.tokens(layer, [association.pop("write") for association in associations])
        for association, promotes, suppresses in zip(associations, up, down, strict=True):
            association |= {"promotes": promotes, "suppresses": suppresses}

    def tokens(self, layer: int, rows: list[Float[Tensor, "width"]]) -> tuple[list[list[str]], list[list[str]]]:
        """Tokens that writes of a layer's attention promote and suppress; none without a vocabulary."""
        tokenizer = self.handle.tokenizer
        narrower = self.weight is not None and bool(rows) and self.weight.shape[1] != len(rows[0])  # OPT-350m projects
        if self.weight is None or tokenizer is None or not rows or narrower:
            return [[] for _ in rows], [[] for _ in rows]
        writes = torch.stack(rows)
        for norm in (self.norms.on_write.get(layer), self.norms.final):
            if norm is not None:
                gain, centres = norm_gain(norm, writes.shape[-1])
                writes = writes - writes.mean(-1, keepdim=True) if centres else writes
                writes = writes * gain.to(writes)
        up, down = [], []
        for part in writes.split(64):  # 64 rows of logits at a time
            logits = (part @ self.weight.to(part.dtype).T)[:, : len(tokenizer)]  # embeddings are often padded
            up.append(logits.topk(PROMOTED).indices)
            down.append((-logits).topk(PROMOTED).indices)
        return self._strings(torch.cat(up)), self._strings(torch.cat(down))

    def _strings(self, ids: Tensor) -> list[list[str]]:
        flat = token_strings(self.handle, ids.flatten().cpu().numpy())
        return [flat[i : i + PROMOTED] for i in range(0, len(flat), PROMOTED)]
