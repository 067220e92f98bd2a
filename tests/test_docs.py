"""The examples in README, docs and docstrings do what they say, on NumPy arrays."""

import doctest
import inspect
import re
from pathlib import Path

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


@pytest.mark.parametrize("name", cupyflash.__all__)
def test_examples_of_public_functions(name):
    """Each has one, and it stands alone: it imports what it uses."""
    assert run(inspect.getdoc(getattr(cupyflash, name)), name, {}) > 0


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}, which does not exist"
