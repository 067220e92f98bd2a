"""The demo: real sentences through a published encoder whose attention is cupyflash, then one very long sequence."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import cupyflash
from cupyflash.demo import long_sequence
from cupyflash.demo.encoder import MiniLM

SENTENCES = (  # pairs of one meaning
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun.",
    "The central bank raised interest rates.",
    "Borrowing money has become more expensive.",
    "Water boils sooner on a high mountain.",
    "At altitude, the boiling point drops.",
    "She plays the violin in the city orchestra.",
    "The concert ended with a long violin solo.",
)
TOLERANCE = 1e-4  # of an embedding's coordinates, against float64
TOKENS = 16_384

NEXT = """Where to go next
   docs/quickstart.md                 the formula, layouts, masks, gradients: all examples run
   examples/cupy_training_step.py     train through attention_vjp, on NumPy or CuPy
   cupyflash info                     what this machine has, and which kernel a problem takes
   README.md                          what is there and what is not yet"""


def run(device: str = "auto", tokens: int = TOKENS, model: Path | None = None) -> int:
    """Runs the demo and returns the exit status: 0 if the embeddings agree with float64.

    Args:
        device: "cpu", "gpu", or "auto" for the GPU where there is one.
        tokens: length of the long sequence.
        model: folder with the model's files; by default the installed package's.
    """
    xp, place = _place(device)
    print(f"cupyflash {cupyflash.__version__} on {place}\n")
    agrees = _sentences(xp, model)
    print(f"\n2. {tokens:,} tokens, causal, forward and backward")
    long_sequence.run(tokens, on_gpu=xp is not np)
    print(f"\n{NEXT}")
    return 0 if agrees else 1


def _place(device: str) -> tuple[Any, str]:
    """The array module, and where it computes in words."""
    if device == "cpu":
        return np, "the CPU, as asked"
    try:
        import cupy
    except ImportError as error:
        reason = f"CuPy cannot be imported: {error}"
    else:
        if cupy.is_available():
            name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
            return cupy, f"the GPU, {name} (CuPy {cupy.__version__})"
        reason = f"CuPy {cupy.__version__} finds no GPU"
    if device == "gpu":
        raise SystemExit(f"cupyflash demo: no GPU to run on: {reason}")
    return np, f"the CPU ({reason})"


def _sentences(xp: Any, folder: Path | None) -> bool:
    try:
        encoder = MiniLM(cupyflash.attention, xp, folder=folder)
    except ModuleNotFoundError as error:
        print(f"cupyflash demo: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    start = time.perf_counter()
    vectors = encoder.encode(SENTENCES)
    seconds = time.perf_counter() - start
    lengths = [len(ids) for ids in encoder.tokens(SENTENCES)]
    print(
        "1. MiniLM sentence embeddings with cupyflash.attention in all "
        f"{encoder.num_layers} layers ({encoder.num_heads} heads)\n"
        f"   {len(SENTENCES)} sentences of {min(lengths)} to {max(lengths)} tokens "
        f"-> {vectors.shape[1]} numbers each, {seconds:.2f} s\n"
    )
    print(similarity_table(SENTENCES, vectors))

    exact = MiniLM(cupyflash.standard_attention, np, "float64", folder).encode(SENTENCES)
    difference = float(np.abs(vectors - exact).max())
    agrees = difference <= TOLERANCE
    print(
        f"\n   largest difference from float64 with textbook attention: {difference:.1e} "
        f"({'within' if agrees else 'NOT within'} {TOLERANCE:.0e})"
    )
    return agrees


def similarity_table(sentences: tuple[str, ...], vectors: Any) -> str:
    """The cosine of each pair of sentences, and for each sentence the number of the most similar other one."""
    cosines = vectors @ vectors.T
    width = max(map(len, sentences))
    lines = [" " * (width + 6) + "".join(f"{n:6}" for n in range(1, len(sentences) + 1)) + "  nearest"]
    for n, sentence in enumerate(sentences):
        nearest = int(np.argmax(np.where(np.arange(len(sentences)) == n, -np.inf, cosines[n])))
        row = "".join(f"{cosine:6.2f}" for cosine in cosines[n])
        lines.append(f"   {n + 1}. {sentence:{width}}{row}  {nearest + 1:>7}")
    return "\n".join(lines)
