"""Gains: what a perturbation of one layer's responses becomes in the residual stream behind it and at the logits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils import _pytree as tree

from pavinterp.capture.bridge_attention import original
from pavinterp.capture.call import AttentionCall
from pavinterp.errors import UserError
from pavinterp.experiments.continuation import blocks_of, continued, continuing, recording
from pavinterp.experiments.injections import KINDS, Source, Weights, perturbation, sources
from pavinterp.experiments.interventions import logits
from pavinterp.experiments.predictions import Predictions
from pavinterp.models import ModelHandle
from pavinterp.norms import is_norm

TOGETHER = 8  # rows that go through the model together, the unperturbed one among them: their logits are large


@dataclass(frozen=True)
class Stage:
    """One sequence as the unperturbed model reads it: all that perturbed passes begin with.

    Attributes:
        handle: the model.
        tokens: the sequence.
        blocks: the decoder's blocks, in order.
        norms: modules of the model that are norms.
        outputs: what each block put out; empty where no layer is begun at.
        short: layers at which a perturbed pass may begin.
        sources: by layer, what perturbations are made from.
    """

    handle: ModelHandle
    tokens: Int[Tensor, "1 n"]
    blocks: list[nn.Module]
    norms: list[nn.Module]
    outputs: dict[int, Any]
    short: set[int]
    sources: dict[int, Source]

    def begin(self, layer: int, rows: int) -> AbstractContextManager[Any]:
        """In it, passes of so many copies begin at the layer where they may."""
        return continued(self.blocks, self.outputs, layer, rows) if layer in self.short else nullcontext()


@dataclass(frozen=True)
class Passed:
    """What came of the perturbed rows of one pass.

    Attributes:
        changes: relative change of the residual stream after each block, see `relative_change`.
        normed: that of the stream as the next norm makes it (the next block's first, after the last block the final
            one); NaN where no norm takes the stream itself.
        divergence: KL of the unperturbed next-token predictions from the perturbed ones, mean over positions, nats.
        loss_change: of the next token's negative log-likelihood, mean over positions, nats.
        displacement: of the stream after the last block.
        stream: what it is there without perturbation.
    """

    changes: Float[np.ndarray, "rows blocks"]
    normed: Float[np.ndarray, "rows blocks"]
    divergence: Float[np.ndarray, "rows"]
    loss_change: Float[np.ndarray, "rows"]
    displacement: Float[Tensor, "rows n width"]
    stream: Float[Tensor, "n width"]


def relative_change(
    change: Float[Tensor, "rows n width"], stream: Float[Tensor, "n width"]
) -> Float[np.ndarray, "rows"]:
    """`sqrt(mean_t ||change_t||^2 / ||stream_t||^2)`: each position by its own norm.

    Some models have a position or two whose stream is a hundred times as large as all others; a ratio of sums would
    speak of those alone. Squares of orthogonal changes add up in it.
    """
    ratio = change.double().square().sum(-1) / stream.double().square().sum(-1)
    return ratio.mean(-1).sqrt().cpu().numpy()


def end_gains(
    handle: ModelHandle,
    tokens: Int[Tensor, "n"],
    *,
    layers: Collection[int],
    strength: float = 0.1,
    draws: int = 2,
    kind: str = "interference",
    seed: int = 0,
    sequence: int = 0,
    weights: Weights | None = None,
    short: set[int] | None = None,
) -> pd.DataFrame:
    """By layer, the divergence at the logits per squared relative perturbation: for one sequence.

    A perturbation (`injections.perturbation`) of `strength` times the layer's own write at every position goes into
    the responses of all heads; KL is quadratic in small ones, so that the quotients do not depend on the strength
    while it is small (0.1 is, in the models seen).

    Args:
        handle: the model; `pavinterp.models.untouched` is the caller's to hold.
        tokens: the sequence, on the handle's device.
        layers: attention layers.
        strength: norm of what is injected over that of the layer's attention write, at every position.
        draws: perturbations that means are taken over.
        kind: one of `injections.KINDS`.
        seed, sequence: of the draws; `sequence` so that sequences have draws of their own.
        weights: of the layers' `W_O`, looked into and added to: the same for all sequences of a model.
        short: from `continuing`, for layers of this model; found out where not given (two passes a layer).

    Returns:
        Indexed by `layer`: `divergence` (KL, nats per token, mean over draws), `change` (relative change of the
        residual stream after the layer's own block, root mean square over draws), `end_gain_write` =
        `divergence / strength^2` (nats per squared norm relative to the layer's write) and `end_gain` =
        `divergence / change^2` (nats per squared change relative to the stream after the block). To weigh a
        head's error by it, take `end_gain_write` for an error relative to the layer's write.

    Raises:
        UserError: the residual stream after each block cannot be seen, or a layer has no interference.
    """
    stage = staged(handle, tokens[None], layers, Weights.none_yet() if weights is None else weights, short)
    rows = []
    for layer in sorted(stage.sources):
        delta = torch.stack([drawn(stage.sources[layer], kind, seed, sequence, draw) for draw in range(draws)])
        passed = [perturbed(stage, {layer: part}, [strength] * len(part)) for part in delta.split(TOGETHER - 1)]
        divergence = float(np.concatenate([p.divergence for p in passed]).mean())
        square = float(np.square(np.concatenate([p.changes[:, layer] for p in passed])).mean())
        rows.append((layer, divergence, square**0.5, divergence / strength**2, divergence / square))
    columns = ["layer", "divergence", "change", "end_gain_write", "end_gain"]
    return pd.DataFrame(rows, columns=columns).set_index("layer")


def drawn(source: Source, kind: str, seed: int, sequence: int, draw: int) -> Float[Tensor, "n heads_d_v"]:
    """The perturbation of relative norm 1 of one layer, sequence and draw: the same wherever it is asked for."""
    rng = np.random.default_rng([seed, sequence, source.layer, draw, KINDS.index(kind)])
    return perturbation(source, kind, rng)


def staged(
    handle: ModelHandle,
    tokens: Int[Tensor, "1 n"],
    layers: Collection[int],
    weights: Weights,
    short: set[int] | None = None,
) -> Stage:
    """The unperturbed sequence, read once or twice.

    Args:
        handle: the model; `untouched` is the caller's to hold.
        tokens: the sequence.
        layers: those that will be perturbed.
        weights: looked into and added to.
        short: as for `end_gains`.

    Raises:
        UserError: the model has no list of blocks of its depth, or a layer has no interference.
    """
    blocks = blocks_of(handle)
    if not blocks:
        raise UserError(
            f"{handle.architecture} has no list of decoder blocks as long as it has layers: the residual stream after "
            "each cannot be seen, so that no gain can be measured"
        )
    short = continuing(handle, tokens, set(layers)) if short is None else short
    with recording(blocks if short else []) as outputs:
        found = sources(handle, tokens, layers, weights)
    width = int(handle.model.config.get_text_config().hidden_size)
    root: Any = handle.model if handle.bridge is None else handle.bridge
    norms = [module for module in root.modules() if is_norm(original(module), width)]
    return Stage(handle, tokens, blocks, norms, outputs, short & set(found), found)


def perturbed(
    stage: Stage, deltas: Mapping[int, Float[Tensor, "rows_or_1 n heads_d_v"]], strengths: Sequence[float]
) -> Passed:
    """One pass in which each row's responses are those of the model plus what is given for it, times its strength.

    An unperturbed row goes through the model beside them, and all changes are against that one, so that rounding of
    another batch size is in none of them.

    Args:
        stage: of the sequence.
        deltas: by layer, what is added to the responses; the pass begins at the first of them where it may.
        strengths: one a row.

    Raises:
        UserError: the stream after a block has another shape than positions x width, blocks in front of the first
            layer change (they are not numbered as the layers are), or something is not finite.
    """
    rows, times = len(strengths), torch.tensor(strengths, dtype=torch.float64)[:, None, None]
    first, changes, normed = min(deltas), dict[int, Any](), dict[int, Any]()
    last: list[Tensor] = []

    def edit(call: AttentionCall) -> Tensor:
        changed = call.response.clone()
        delta = deltas[call.layer]
        changed[1:] += (delta * times.to(delta)).to(changed.dtype)
        return changed

    def on_stream(block: int, stream: Tensor) -> None:
        change = stream[1:] - stream[0]
        changes[block] = relative_change(change, stream[0])
        last[:] = [change, stream[0]]

    def on_normed(block: int, stream: Tensor) -> None:
        normed[block] = relative_change(stream[1:] - stream[0], stream[0])

    with stage.begin(first, rows + 1), watching(stage, on_stream, on_normed, rows + 1):
        every = logits(stage.handle, stage.tokens.expand(rows + 1, -1), edit, set(deltas))
    whole = Predictions.of(every[0], stage.tokens[0])
    ends = np.array([whole.against(row) for row in every[1:]])
    nothing = np.full(rows, np.nan)
    table = np.stack([changes.get(block, nothing) for block in range(len(stage.blocks))], axis=1)
    _require_sound(stage, table, ends, first)
    of_norms = np.stack([normed.get(block, nothing) for block in range(len(stage.blocks))], axis=1)
    return Passed(table, of_norms, ends[:, 0], ends[:, 1], *last)


def _require_sound(stage: Stage, changes: np.ndarray, ends: np.ndarray, first: int) -> None:
    if not (np.isfinite(changes).all() and np.isfinite(ends).all()):
        raise UserError(
            f"{stage.handle.architecture}: with layer {first} perturbed the residual stream or the predictions are not "
            "finite, or a block was not run: measure in float32, or at smaller strengths"
        )
    if (changes[:, :first] != 0).any():
        raise UserError(
            f"{stage.handle.architecture}: what layer {first} is given changes blocks in front of number {first}: its "
            "blocks are not numbered as its layers are, so that no gain can be measured"
        )


@contextmanager
def watching(
    stage: Stage, on_stream: Callable[[int, Tensor], None], on_normed: Callable[[int, Tensor], None], rows: int
) -> Iterator[None]:
    """Inside, the residual stream after each block is handed over, and what the next norm makes of that very stream.

    Args:
        stage: whose blocks and norms.
        on_stream, on_normed: called with the block's number and a tensor [rows, n, width].
        rows: that go through the model.

    Raises:
        UserError: a block puts out no stream of that shape.
    """
    n, width = stage.tokens.shape[1], int(stage.handle.model.config.get_text_config().hidden_size)
    pending: list[tuple[int, Tensor]] = []

    def after_block(block: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = [leaf for leaf in tree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.ndim > 2]
            if not tensors or tensors[0].shape != (rows, n, width):
                shape = tuple(tensors[0].shape) if tensors else None
                raise UserError(
                    f"{stage.handle.architecture}: block {block} puts out {shape}, not one residual stream of "
                    f"{(rows, n, width)}: no gain can be measured"
                )
            pending[:] = [(block, tensors[0])]
            on_stream(block, tensors[0])

        return hook

    def after_norm(module: nn.Module, inputs: Any, given: dict[str, Any], output: Any) -> None:
        entering = next(iter((*inputs, *given.values())), None)
        if not pending or not isinstance(entering, Tensor) or not isinstance(output, Tensor):
            return
        block, stream = pending[0]
        if entering.shape == stream.shape and (entering is stream or torch.equal(entering, stream)):
            pending.clear()
            on_normed(block, output)

    with ExitStack() as hooks:
        for i, block in enumerate(stage.blocks):
            hooks.callback(block.register_forward_hook(after_block(i)).remove)
        for norm in stage.norms:
            hooks.callback(norm.register_forward_hook(after_norm, with_kwargs=True).remove)
        yield
