"""The examples in README and docs do what they say, on NumPy arrays."""

import doctest
import inspect
import re
from pathlib import Path

import pytest

import cupyflash

ROOT = Path(__file__).parents[1]
PAGES = sorted(path.relative_to(ROOT) for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_examples_of_a_page(page):
    blocks = [block for block in PYTHON_BLOCK.findall((ROOT / page).read_text()) if ">>>" in block]
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, str(page), str(page), 0)
    report = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
    assert not report, "".join(report)


def test_quickstart_has_examples():
    """Guards the block pattern: a page whose blocks are not found would pass unseen."""
    text = (ROOT / "docs" / "quickstart.md").read_text()
    assert sum(block.count(">>> ") for block in PYTHON_BLOCK.findall(text)) == text.count(">>> ") > 30


@pytest.mark.parametrize("name", cupyflash.__all__)
def test_public_functions_show_an_example(name):
    """test_api.py runs them; this finds a function that came without."""
    assert ">>> " in inspect.getdoc(getattr(cupyflash, name))


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", (ROOT / page).read_text()):
            file = (ROOT / page).parent.joinpath(target) if target else ROOT / page
            assert file.exists(), f"{page} links to {target}, which does not exist"
            assert not anchor or anchor in anchors(file), (
                f"{page} links to {target}#{anchor}, which has no such heading"
            )


def anchors(page):
    """Of its headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
