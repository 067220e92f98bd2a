"""The command line says what is there, and plans for GPUs that are not."""

import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import cupyflash
from cupyflash.cli import main
from cupyflash.cli.explain import explain
from cupyflash.resources import KNOWN_GPUS
from cupyflash.tiles import TileConfig
from cupyflash.tuning import store


def no_gpu():
    raise RuntimeError("there is no GPU")


def test_info_names_versions_and_what_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["info"]) == 0
    said = capsys.readouterr().out
    assert re.search(rf"^cupyflash +{cupyflash.__version__} in ", said, re.MULTILINE)
    assert re.search(rf"^numpy +{re.escape(np.__version__)}$", said, re.MULTILINE)
    assert 'pip install "cupyflash[cuda' in said


def test_info_survives_a_broken_installation(capsys, monkeypatch):
    cupy = pytest.importorskip("cupy")

    def broken(*_):
        raise OSError("libnvrtc.so: cannot open shared object file")

    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", broken)
    assert main(["info"]) == 0
    assert "unknown (OSError: libnvrtc.so" in capsys.readouterr().out


@pytest.mark.parametrize("gpu", KNOWN_GPUS)
def test_explain_plans_within_the_limits_of_every_gpu(gpu):
    said = explain(f"B=8 S=256 H=12 D=128 causal gpu={gpu}", no_gpu)
    assert "B=8 Sq=256 Sk=256 H=12 Hk=12 D=128 Dv=128 float16, scale 0.0883883, visible j - i <= 0" in said
    assert re.search(
        r"^forward +(wgmma|mma) Br=\d+ Bc=\d+ warps=\d+.*\((tuned: packaged .*|heuristic)\)$", said, re.MULTILINE
    )
    assert re.search(r"^backward", said, re.MULTILINE)
    needed = [float(kib) for kib in re.findall(r"threads, ([\d.]+) KiB", said)]
    assert 0 < max(needed) <= KNOWN_GPUS[gpu].shared_bytes / 1024


@pytest.mark.parametrize(
    ("description", "said"),
    [
        ("gpu=A100", "not wgmma: wgmma needs sm_90; NVIDIA A100-SXM4-80GB is sm_80"),
        ("gpu=B200", "not wgmma: wgmma needs sm_90; NVIDIA B200 is sm_100"),
        ("gpu=H100 D=60", "not wgmma: tensor maps need strides above 0, and addresses, strides and rows that are"),
        ("gpu=H100 dtype=float32", "not wgmma: wgmma kernels compute float16 and bfloat16, not float32"),
        ("gpu=H100 dtype=float32 precision=tf32", "not wgmma: wgmma kernels compute float16 and bfloat16, not float32"),
        ("gpu=T4 dtype=bfloat16", "not mma: bfloat16 on tensor cores needs sm_80; Tesla T4 is sm_75"),
        ("gpu=H100", "arrays with negative or zero strides, or not aligned to 16 bytes, take mma"),
    ],
)
def test_explain_says_why_a_family_is_not_taken(description, said):
    forward, _ = explain(description, no_gpu).split("\nbackward", 1)
    assert said in forward
    assert ("not wgmma" in forward) == ("take mma" not in forward)


def test_a_family_that_was_slower_is_passed_over(monkeypatch):
    slower = TileConfig("mma", 64, 32, 4)
    winner = SimpleNamespace(config=slower, origin="tuned", distance=0.0, is_general=True)
    monkeypatch.setattr(store, "find", lambda task, *_: (winner,) if task == "forward" else ())
    assert "not wgmma: was slower where it was measured" in explain("gpu=H100", no_gpu)


@pytest.mark.parametrize(
    ("sizes", "shared_out"),
    [
        ("B=2 H=16", "of the key tiles, those behind the first 1,980 are shared out"),
        ("H=1", "of the key tiles, all are shared out"),
        ("H=1 causal", None),
    ],
)
def test_explain_says_what_is_shared_out(sizes, shared_out):
    said = explain(f"{sizes} S=8192 D=128 dtype=bfloat16 gpu=H200", no_gpu)
    assert shared_out in said if shared_out else "shared out" not in said


def test_explain_takes_every_option():
    said = explain(
        "Sq=1 Sk=100 Hk=2 H=8 Dv=32 scale=-1 softcap=30 window=7,None dtype=float32 precision=tf32 gpu=A100", no_gpu
    )
    assert "Sq=1 Sk=100 H=8 Hk=2 D=64 Dv=32 float32, scale -1, visible 92 <= j - i, softcap 30, tf32" in said


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("seqlen=4", "unknown key 'seqlen'"),
        ("S=many gpu=H200", "S is 'many'; expected a number"),
        ("S= gpu=H200", "S is ''; expected a number"),
        ("S gpu=H200", "S needs a value"),
        ("H=3 Hk=2 gpu=H200", "num_heads must be a multiple of num_kv_heads"),
        ("window=3 gpu=H200", "expected LEFT,RIGHT"),
        ("S=0 gpu=H200", "S is 0; expected 1 at least"),
        ("B=-1 gpu=A100", "B is -1; expected 1 at least"),
        ("deterministic=yes gpu=H200", "deterministic is 'yes'; expected True or False"),
        ("dtype=float64 gpu=H200", "expected one of float16, bfloat16, float32"),
        ("causal=maybe gpu=H200", "causal is 'maybe'"),
        ("gpu=H2000", "expected one of T4, "),
        ("S=64", "there is no GPU; or name a GPU to plan for"),
    ],
)
def test_explain_says_what_is_wrong(description, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        explain(description, no_gpu)


def test_a_demo_of_nothing_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--tokens", "0"])
    assert stopped.value.code == 2
    assert "--tokens: 0 is no length" in capsys.readouterr().err


def test_a_wrong_description_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["info", "--explain", "colour=blue"])
    assert stopped.value.code == 2
    assert "unknown key 'colour'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["tune", "--dry-run", "--gpu", "A100"], ["config", "show", "--gpu", "H200"], ["info"]], ids=" ".join
)
def test_output_that_nobody_reads_is_no_error(command):
    process = subprocess.Popen(
        [sys.executable, "-m", "cupyflash", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141


@pytest.mark.usefixtures("no_winners")
def test_explain_of_a_deterministic_backward_on_hopper():
    """One kernel, or two where tensor maps cannot describe the arrays."""
    text = explain("S=512 D=64 dtype=bfloat16 causal gpu=H200 deterministic", lambda: None)
    assert "backward_wgmma.cu" in text
    assert text.count("not aligned to 16 bytes, take mma") == 2
