#!/usr/bin/env bash
# On a machine with a GPU: the embedded model gives the same records there as on the CPU; certificate, agreement of the
# two capture paths, and what measuring costs, in three precisions and with every attention kernel that is installed.
# Prints one JSON line a check; exit 1 if one fails. Takes a few minutes after installation.
set -euo pipefail
cd "$(dirname "$0")/.."
python - <<'PY'
import json
import sys
import time
import warnings
from collections import Counter
from importlib.util import find_spec

import numpy as np
import torch

import pavinterp as pi
from pavinterp.measures import all_measures
from pavinterp.sweep import forward, sweep

if not torch.cuda.is_available():
    sys.exit("no CUDA device here")
torch.backends.cuda.matmul.allow_tf32 = False  # TF32 rounds to 10 bits: the certificate would rightly fail
failed = False
columns = [c.name for m in all_measures() for c in m.columns]
runs = {d: pi.measure(pi.load("demo", device=d), "demo", sequences=32, examples=False, progress=False) for d in ("cpu", "cuda")}
for device, run in runs.items():
    print(json.dumps({"device": device, "certificate": run.manifest["certificate"]["largest"], "seconds": run.manifest["wall_seconds"]}))
worst = max(
    float(np.nanmax(np.abs(runs["cpu"].records[c] - runs["cuda"].records[c]) / (1e-3 + np.abs(runs["cpu"].records[c]))))
    for c in columns
)
print(json.dumps({"check": "records of CPU and GPU agree", "largest_relative_difference": worst, "passed": worst < 1e-3}))
failed |= worst >= 1e-3
kernels = ["sdpa", "eager"] + (["flash_attention_2"] if find_spec("flash_attn") else [])
print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "kernels": kernels}))
for dtype, kernel in [(dtype, kernel) for dtype in ("float32", "bfloat16", "float16") for kernel in kernels]:
    if dtype == "float32" and kernel == "flash_attention_2":
        continue  # 16-bit only
    handle = pi.load("demo", device="cuda", dtype=dtype)
    handle.model.set_attn_implementation(kernel)
    answer = pi.verify(handle)
    shown = {name: answer[name] for name in ("largest", "tolerance", "agreement", "agreement_tolerance", "passed")}
    print(json.dumps({"check": f"verify {dtype} {kernel}", **shown, "no_other_path": answer["no_other_path"]}))
    failed |= not answer["passed"]
    text = pi.tokenise(pi.corpus("demo"), handle.tokenizer, context=512, sequences=64)
    tokens = torch.stack([torch.from_numpy(t) for t in text.tokens]).cuda()
    measures = [m for m in all_measures() if m.stimuli == "text"]
    seconds = {}
    for name in ("bare", "measure", "bare", "measure"):  # the first of each warms up
        torch.cuda.synchronize()
        started = time.perf_counter()
        if name == "bare":
            for part in tokens.split(8):
                forward(handle, part)
        else:
            for _ in sweep(handle, text, measures, tests=64, layers=None, batch=8, seed=0):
                pass
        torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - started
    print(json.dumps({"check": f"cost {dtype} {kernel}", **seconds, "ratio": seconds["measure"] / seconds["bare"]}))
    torch.cuda.set_sync_debug_mode("warn")  # how often the CPU waits for the GPU: not once a layer
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        parts = sum(1 for _ in sweep(handle, text, measures, tests=64, layers=None, batch=8, seed=0))
    torch.cuda.set_sync_debug_mode("default")
    waited = [str(wait.filename).rsplit("/", 1)[-1] for wait in waits if "synchroniz" in str(wait.message)]
    print(json.dumps({"check": f"waits a batch {dtype} {kernel}", "number": len(waited) / parts, "in": Counter(waited)}))
sys.exit(failed)
PY
