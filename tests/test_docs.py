"""Every example runs: those of the docstrings one by one, those of a Markdown file in order."""

import inspect
import pathlib
import re
import textwrap

import keras
import pytest

import keras_transformer as kt

ROOT = pathlib.Path(__file__).parents[1]
PUBLIC = sorted(name for name, value in vars(kt).items() if inspect.isclass(value) or inspect.isfunction(value))
TENSORFLOW_ONLY = (
    "TextGenerator",
    "Tokenizer",
    "Translator",
    "WordPiece",
    "labeled_batches",
    "masked_batches",
    "pair_batches",
    "read_records",
    "text_batches",
)
MARKDOWN = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")))


def python_blocks(text):
    return [
        textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    ]


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_examples_run_by_themselves(name):
    if name in TENSORFLOW_ONLY and keras.backend.backend() != "tensorflow":
        pytest.skip("text and data are TensorFlow's")
    text = getattr(kt, name).__doc__
    blocks = python_blocks(text)
    assert blocks and "Example:" in text
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"<example {number} of {name}>", "exec"), {"__name__": name})


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_starts_with_a_sentence_and_names_every_argument(name):
    public = getattr(kt, name)
    assert re.match(r"\S.*[.`:]", public.__doc__)
    parameters = inspect.signature(public.__init__ if inspect.isclass(public) else public).parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} - {"self"}
    if "Args: as `" not in public.__doc__:
        described = re.findall(r"^ +((?:[*\w]+, )*[*\w]+): ", public.__doc__, re.M)
        assert sorted(named - {name for names in described for name in names.split(", ")}) == []


@pytest.mark.slow
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the documents show text, data and export too")
@pytest.mark.parametrize("document", MARKDOWN)
def test_the_blocks_of_a_document_run_in_order(document, tmp_path, monkeypatch):
    path = ROOT / document
    if not path.exists():
        pytest.skip(f"no {document} yet")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "document"}
    for number, block in enumerate(python_blocks(path.read_text(encoding="utf-8")), 1):
        exec(compile(block, f"<block {number} of {document}>", "exec"), namespace)
