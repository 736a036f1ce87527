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
    output = run(tmp_path, "pronounce.py", "train", "--words", "3000", "--epochs", "12")
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


def test_translate_learns_a_small_language(tmp_path):
    digits = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(digits, size=random.integers(4, 7))) for _ in range(3000)]  # BLEU counts 4-grams
    lines = [f"{text}\t{text.upper()}" for text in texts]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    output = run(tmp_path, "translate.py", "train", "pairs.tsv", "--epochs", "20", "--vocabulary", "330")
    assert float(re.search(r"BLEU = ([\d.]+)", output)[1]) > 90
    assert run(tmp_path, "translate.py", "translate", "six seven one two").strip() == "SIX SEVEN ONE TWO"


def test_translate_names_the_line_that_is_no_pair(tmp_path):
    (tmp_path / "pairs.tsv").write_text("a\tb\nno tab here\n", encoding="utf-8")
    command = [sys.executable, str(EXAMPLES / "translate.py"), "train", "pairs.tsv"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "line 2" in done.stderr
