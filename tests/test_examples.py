"""The examples as a user runs them: as programs, in an empty folder."""

import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="text needs TensorFlow"),
]


def run(folder, program, *arguments):
    command = [sys.executable, str(EXAMPLES / program), *arguments]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "MPLBACKEND": "agg"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_reverse_learns_to_reverse(tmp_path):
    output = run(tmp_path, "reverse.py")
    assert "['cba', 'egdab', 'daeh']" in output
    assert (tmp_path / "runs/reverse/saved_model.pb").exists()


def test_pronounce_trains_plots_exports_and_speaks(tmp_path):
    output = run(tmp_path, "pronounce.py", "train", "--words", "3000", "--epochs", "20")
    rates = re.findall(r"(greedy|beam of 4): word error rate ([\d.]+)%, phoneme error rate ([\d.]+)%", output)
    (_, *greedy), (_, *beam) = rates
    assert float(greedy[0]) < 98 and float(greedy[1]) < 60  # 87 % and 39 % when it was written
    assert float(beam[0]) <= float(greedy[0]) + 0.5
    losses = [float(loss) for loss in re.findall(r"val_token_loss: ([\d.]+)", output)]
    assert losses[-1] < losses[0] < 3.8  # 3.8 nats: even guessing among 43
    written = {path.name for path in (tmp_path / "runs/pronounce").iterdir()}
    assert {"pronounce.keras", "saved_model", "learning_curve.png", "attention.png"} <= written
    said = run(tmp_path, "pronounce.py", "say", "Keras", "attention")
    assert len(re.findall(r"(?m)^(Keras|attention) .* \(-\d.*, .* \(-\d.*, .* \(-\d", said)) == 2


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder with pairs of a small language, and what `translate.py train` said of them."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(words, size=random.integers(4, 7))) for _ in range(3000)]  # BLEU counts 4-grams
    folder = tmp_path_factory.mktemp("digits")
    lines = [f"{text}\t{text.upper()}\n" for text in texts]
    (folder / "pairs.tsv").write_text("".join(lines), encoding="utf-8")
    (folder / "few.tsv").write_text("".join(lines[:8]), encoding="utf-8")
    output = run(folder, "translate.py", "train", "pairs.tsv", "--epochs", "10", "--vocabulary", "330")
    return folder, output


def test_translate_learns_a_small_language(digits):
    folder, output = digits
    assert [float(score) > 90 for score in re.findall(r"BLEU = ([\d.]+)", output)] == [True, True]  # greedy, beam
    written = {path.name for path in (folder / "runs/translate").iterdir()}
    assert written == {"translate.keras", "saved_model", "learning_curve.png", "log.csv"}
    log = (folder / "runs/translate/log.csv").read_text(encoding="utf-8").splitlines()
    assert len(log) == 11 and "val_bleu" in log[0] and "val_token_loss" in log[0]


def test_translate_evaluates_translates_and_exports_anew(digits):
    folder, _ = digits
    assert run(folder, "translate.py", "translate", "six seven one two").strip() == "SIX SEVEN ONE TWO"
    output = run(folder, "translate.py", "evaluate", "few.tsv")
    assert "8 sentences" in output and len(re.findall(r"BLEU = \d|chrF2 = \d|TER = \d", output)) == 6
    run(folder, "translate.py", "export", "--width", "3", "--n", "2")
    both = run(folder, "translate.py", "translate", "six seven one two").strip().split("\t")
    assert len(both) == 2 and both[0] == "SIX SEVEN ONE TWO" != both[1]


def test_translate_takes_a_preset_and_a_policy(digits):
    folder, _ = digits
    options = ["--epochs", "1", "--preset", "small", "--policy", "mixed_bfloat16", "--tokens", "4096"]
    output = run(folder, "translate.py", "--folder", "other", "train", "pairs.tsv", "--vocabulary", "330", *options)
    assert "'preset': 'small'" in output and (folder / "other/saved_model").exists()


def test_translate_names_the_line_that_is_no_pair(tmp_path):
    (tmp_path / "pairs.tsv").write_text("a\tb\nno tab here\n", encoding="utf-8")
    command = [sys.executable, str(EXAMPLES / "translate.py"), "train", "pairs.tsv"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "line 2" in done.stderr
