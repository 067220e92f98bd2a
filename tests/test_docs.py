"""The examples in README, docs and docstrings do what they say, on NumPy arrays."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest

import cupyflash

ROOT = Path(__file__).parents[1]
PAGES = sorted(path.relative_to(ROOT) for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def run(examples: str, name: str, names: dict) -> int:
    """Runs a text's examples and returns how many there were; the first failure's report is raised."""
    test = doctest.DocTestParser().get_doctest(examples, names, name, name, 0)
    report = []
    outcome = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
    assert not outcome.failed, "".join(report)
    return outcome.attempted


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_examples_of_a_page(page):
    blocks = PYTHON_BLOCK.findall((ROOT / page).read_text())
    run("\n".join(block for block in blocks if ">>>" in block), str(page), {})


def test_quickstart_has_examples():
    """Guards the block pattern: a page whose blocks are not found would pass unseen."""
    text = (ROOT / "docs" / "quickstart.md").read_text()
    assert sum(block.count(">>> ") for block in PYTHON_BLOCK.findall(text)) == text.count(">>> ") > 30


def documented_modules():
    for module in pkgutil.walk_packages(cupyflash.__path__, "cupyflash."):
        if not module.name.endswith("__main__"):
            yield module.name


@pytest.mark.parametrize("name", documented_modules())
def test_examples_of_docstrings(name):
    module = importlib.import_module(name)
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, 16, 4, 32), dtype=np.float32) for _ in range(4))
    arrays = {"np": np, "numpy": np, "cupyflash": cupyflash, "q": q, "k": k, "v": v, "dout": dout}
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        if test.examples:
            run(test.docstring, test.name, arrays | vars(module))


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}, which does not exist"
