from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from email.parser import BytesParser
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from building import build

import hivenb
from hivenb import errors

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="the tests run apart from the source tree"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    with zipfile.ZipFile(build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))) as opened:
        yield opened


def test_the_wheel_has_the_version_of_the_package(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    described = BytesParser().parsebytes(wheel.read(name))
    assert described["Name"] == "hivenb"
    assert described["Version"] == hivenb.__version__
    assert described["License-Expression"] == "Apache-2.0"


def test_the_wheel_carries_every_module_and_the_licence(wheel):
    carried = set(wheel.namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "hivenb").rglob("*.py")}
    assert modules <= carried
    assert {"hivenb/py.typed", "hivenb/view/charts/pointer.js"} <= carried
    assert any(name.endswith("licenses/LICENSE") for name in carried)
    assert not any(name.startswith(("tests/", "notebooks/")) for name in carried)
    assert {Path(name).suffix for name in carried if name.startswith("hivenb/_notebooks/")} == {".ipynb"}


def test_the_wheel_installs_the_command(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "hivenb = hivenb.app.cli:main" in wheel.read(name).decode()


def test_notebooks_are_found_from_a_wheel(wheel, tmp_path):
    there = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    if not there:
        pytest.skip("there is no notebook yet")
    wheel.extractall(tmp_path)
    script = (
        "from hivenb.system.environment import notebook; import sys; print(*map(notebook, sys.argv[1:]), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *there],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    for name, found in zip(there, map(Path, done.stdout.splitlines()), strict=True):
        assert found.is_relative_to(tmp_path)
        assert found.read_bytes() == (ROOT / "notebooks" / name).read_bytes()


def test_an_installed_package_knows_its_version():
    try:
        installed = metadata.version("hivenb")
    except metadata.PackageNotFoundError:
        pytest.skip("hivenb is imported from the checkout and not installed")
    assert installed == hivenb.__version__


def test_ci_readme_and_guide_give_the_same_commands():
    ci, readme = (ROOT / ".ci" / "run").read_text().replace(" --quiet", ""), (ROOT / "README.md").read_text()
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    install = 'pip install -e ".[test]" -c binder/constraints.txt'
    tests = (
        'pytest -m "not process" -n auto',
        'pytest -m "process and not quiet" -n 3 --dist loadfile',
        "pytest -m quiet",
    )
    assert f"{install}\n{' && '.join(tests)}\n" in readme
    assert all(f"{command}\n" in ci for command in (install, *tests))
    assert all(f"`{command}`" in guide for command in tests)
    fuzzer, minute = 'pip install -e ".[fuzz]" -c binder/constraints.txt', "python -m tests.fuzzing --seconds 60"
    assert f"{fuzzer}\n{minute}\n" in guide
    assert f"{fuzzer}\n" in ci
    assert f"{minute} --seed 1\n" in ci
    install_book = 'pip install -e ".[book]" -c binder/constraints.txt'
    build_book = "jupyter-book build notebooks --path-output build/book -W -n --keep-going"
    assert f"{install_book}\n{build_book}\n" in guide, "and tests/test_book.py runs it"
    assert 'pip install -e ".[demo]" -c binder/constraints.txt && hivenb demo' in readme
    assert 'readme = "README.md"' in (ROOT / "pyproject.toml").read_text()


def test_the_book_explains_errors_in_the_words_in_which_they_are_raised():
    table = (ROOT / "notebooks" / "book" / "if_it_does_not_work.md").read_text()
    told = re.findall(r"^\| `(\w+Error)(?:: ([^`]+))?` \|", table, flags=re.MULTILINE)
    source = "".join(path.read_text() for path in (ROOT / "hivenb").rglob("*.py"))
    assert len(told) >= 5
    for name, words in told:
        assert issubclass(getattr(errors, name), errors.HivenbError)
        assert all(part in source for part in re.split(r"/dev/shm| \.\.\. |'default'", words)), words


def test_the_pictures_are_those_of_the_gallery_described_and_small():
    there = {path.stem: path for path in (ROOT / "notebooks" / "pictures").glob("*.png")}
    pages = [ROOT / "README.md", *(ROOT / "notebooks" / "book").glob("*.md")]
    text = "".join(page.read_text() for page in pages)
    shown = dict(re.findall(r"!\[([^\]]*)\]\([./\w]*pictures/(\w+)\.png\)", text))
    assert set(shown.values()) == set(there)
    assert all(len(text) > 40 for text in shown), "who cannot see them is told what is on them"
    assert sum(path.stat().st_size for path in there.values()) < 600_000
    pytest.importorskip("playwright", reason="playwright is not installed")
    from look_at_notebooks import GALLERY

    assert set(GALLERY) == set(there)


def test_pictures_of_a_gpu_are_on_the_page_of_benchmarks_described_and_small():
    there = {path.stem: path for path in (ROOT / "notebooks" / "pictures" / "gpu").iterdir()}
    page = (ROOT / "tests" / "benchmarks" / "README.md").read_text()
    shown = dict(re.findall(r"!\[([^\]]*)\]\(\.\./\.\./notebooks/pictures/gpu/(\w+)\.png\)", page))
    assert set(shown.values()) == set(there)
    assert all(len(text) > 40 for text in shown)
    assert sum(path.stat().st_size for path in there.values()) < 200_000


def test_the_readme_is_read_to_its_end():
    """In 900 words, with one picture; all else is in the book."""
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) <= 900
    assert len(re.findall(r"!\[", readme)) == 1


def test_the_readmes_snippets_stand_as_they_are():
    """No name in them is one that only the reader knows; tests/test_readme.py runs them."""
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(snippets) == 3
    for snippet in snippets:
        tree = ast.parse(snippet)
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        bound = {name.id for name in names if isinstance(name.ctx, ast.Store)}
        bound |= {alias.asname or alias.name for node in ast.walk(tree) for alias in getattr(node, "names", ())}
        assert {name.id for name in names} <= bound


def test_the_changelog_knows_this_version_or_has_what_is_unreleased():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert {"Unreleased", hivenb.__version__} & set(headings)


def test_a_citation_names_this_version_and_has_what_its_format_asks_for():
    """As https://github.com/citation-file-format/citation-file-format/blob/1.2.0/schema-guide.md says."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert cited["version"] == hivenb.__version__
    assert cited["license"] == "Apache-2.0"
    for work in (cited, *cited["references"]):
        assert work["title"]
        assert all(set(author) in ({"name"}, {"family-names", "given-names"}) for author in work["authors"])
        assert work["type"] in ("software", "article", "conference-paper")
    assert cited["message"]
    assert {"Hivemind", "PyTorch Lightning", "DiLoCo"} <= {work["title"].split(":")[0] for work in cited["references"]}


def test_the_guide_for_contributors_names_files_and_extras_that_are_there():
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:hivenb|tests|binder|\.ci)(?:/[\w.-]+)+)`", guide))
    named |= set(re.findall(r"python ((?:tests)/[\w./-]+)", guide)) | set(re.findall(r"\]\(([^)h][^)]*)\)", guide))
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).exists()] == []
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\[(\w+)\]\"", guide)) <= set(extras)


def test_compromised_lightning_releases_are_refused():
    text = (ROOT / "pyproject.toml").read_text()
    assert "!=2.6.2" in text
    assert "!=2.6.3" in text
