"""Tiny random Hugging Face models and what surrounds them on disk, built from configurations: no network, no files."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 300  # 256 bytes, one special token, a few merges
BOS = "<|endoftext|>"
TEXT = [
    "A bell rings and the meat comes; after some days the bell alone is enough.",
    "The dog has learned that one thing follows another, and what follows is worth waiting for.",
    "Ring the bell without the meat for long enough and the waiting stops.",
]


def _build(kind: type[PreTrainedModel], config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """The model in evaluation mode; the same seed gives the same weights, and the global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config).eval()


def gpt2(seed: int = 0, *, layers: int = 2, heads: int = 4, width: int = 32, positions: int = 64) -> GPT2LMHeadModel:
    """Learned positions, one fused projection, tied embeddings; d_k = 8."""
    config = GPT2Config(
        n_layer=layers, n_head=heads, n_embd=width, n_positions=positions, vocab_size=VOCABULARY,
        bos_token_id=0, eos_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return _build(GPT2LMHeadModel, config, seed)


def llama(seed: int = 0, *, layers: int = 2, heads: int = 4, kv_heads: int = 2, width: int = 32) -> LlamaForCausalLM:
    """Rotary positions and grouped queries: 4 query heads on 2 KV heads; d_k = 8."""
    config = LlamaConfig(
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=width,
        intermediate_size=2 * width, max_position_embeddings=128, vocab_size=VOCABULARY,
        bos_token_id=0, eos_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return _build(LlamaForCausalLM, config, seed)


def gemma3(seed: int = 0, *, window: int = 8) -> Gemma3ForCausalLM:
    """q/k normalisation, a sliding window in layers 0 and 2, one KV head, d_k = 16 (width / heads is 8)."""
    config = Gemma3TextConfig(
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1, head_dim=16, hidden_size=32,
        intermediate_size=64, max_position_embeddings=128, vocab_size=VOCABULARY, sliding_window=window,
        layer_types=["sliding_attention", "full_attention"] * 2, query_pre_attn_scalar=16,
        bos_token_id=0, eos_token_id=0, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return _build(Gemma3ForCausalLM, config, seed)


def bert(seed: int = 0) -> BertForMaskedLM:
    """An encoder: every position sees every other."""
    config = BertConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32, vocab_size=VOCABULARY,
        max_position_embeddings=64,
    )  # fmt: skip
    return _build(BertForMaskedLM, config, seed)


def t5(seed: int = 0) -> T5ForConditionalGeneration:
    """An encoder and a decoder."""
    config = T5Config(
        num_layers=2, num_heads=2, d_model=16, d_kv=8, d_ff=32, vocab_size=VOCABULARY, decoder_start_token_id=0
    )
    return _build(T5ForConditionalGeneration, config, seed)


def mamba(seed: int = 0) -> MambaForCausalLM:
    """A decoder without attention."""
    config = MambaConfig(
        num_hidden_layers=2, hidden_size=16, state_size=4, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0,
        pad_token_id=0,
    )  # fmt: skip
    return _build(MambaForCausalLM, config, seed)


def tokenizer(*, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCABULARY` tokens, BOS = EOS = id 0, put in front if `adds_bos`."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[BOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    core.train_from_iterator(TEXT, trainer)
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=BOS, eos_token=BOS)


def model_folder(folder: Path, model: PreTrainedModel | None = None) -> Path:
    """Write a model (else a tiny GPT-2) and the tiny tokenizer as the hub lays them out; return the folder."""
    (gpt2() if model is None else model).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def hub_cache(cache: Path, name: str, folder: Path, branch: str = "main") -> str:
    """Lay `folder` out in a Hugging Face cache as if downloaded as `name`; return the commit hash.

    `cache` is what HF_HUB_CACHE points at: `models--ORG--NAME/{refs,snapshots}`.
    """
    repository = cache / f"models--{name.replace('/', '--')}"
    commit = hashlib.sha1(f"{name} {branch}".encode()).hexdigest()
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / branch).write_text(commit)
    return commit


def gguf_file(
    path: Path,
    *,
    kind: str = "F32",
    architecture: str = "llama",
    model: LlamaForCausalLM | None = None,
    more: dict[str, object] | None = None,
) -> Path:
    """Write a Llama (else `llama(width=64)`) and the tiny tokenizer as a .gguf file; return its path.

    `kind` is how the matrices are stored (F32, Q8_0, Q5_0, ...), `architecture` what the header claims. `more` adds
    tensors (arrays) and header fields (text and integers) by name.
    """
    model = llama(width=64) if model is None else model
    config, words = model.config, tokenizer()
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    tokens = sorted(words.get_vocab(), key=words.get_vocab().get)
    writer.add_token_list(tokens)
    writer.add_token_types([int(gguf.TokenType.CONTROL if t == BOS else gguf.TokenType.NORMAL) for t in tokens])
    writer.add_token_merges(
        [" ".join(pair) for pair in json.loads(words.backend_tokenizer.to_str())["model"]["merges"]]
    )
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = weight.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:  # the format pairs the two halves of each head's rotary dimensions
            rows = array.reshape(heads, 2, -1, array.shape[1])
            array = rows.swapaxes(1, 2).reshape(array.shape)
        stored = gguf.GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
        writer.add_tensor(names.get_name(name, (".weight",)), gguf.quants.quantize(array, stored), raw_dtype=stored)
    for name, value in (more or {}).items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint16(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
