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


@pytest.fixture(scope="module")
def measurements(tmp_path_factory):
    """A folder with four months of hours, the temperatures of the day after it, and what `forecast.py train` said.

    Days differ by a level that the pressure tells a day before; the temperature itself does not.
    """
    hours = np.arange(120 * 24)
    random = np.random.default_rng(0)
    level = np.cumsum(random.normal(size=len(hours) + 48))
    level = 4 * (level[24:] - level[:-24]) / 24**0.5
    temperature = 15 + 6 * np.sin(2 * np.pi * np.arange(len(level)) / 24) + level
    times = np.datetime64("2023-01-01T00", "h") + hours
    rows = [f"{time},north,{t:.3f},{1000 + p:.3f}" for time, t, p in zip(times, temperature, level[24:])]
    folder = tmp_path_factory.mktemp("measurements")
    (folder / "hours.csv").write_text("\n".join(["time,station,air,pressure", *rows]), encoding="utf-8")
    output = run(folder, "forecast.py", "train", "--csv", "hours.csv", "--target", "air", "--epochs", "20")
    return folder, temperature[-24:], output


def test_forecast_learns_what_the_day_before_does_not_tell(measurements):
    folder, _, output = measurements
    table = output[output.index("for test") :]
    errors = {name: float(mean) for name, mean in re.findall(r"(?m)^(\S+(?: \S+)*)(?: +[\d.]+){3} +([\d.]+)$", table)}
    assert set(errors) == {"Transformer", "linear", "the day before", "the last hour"}
    assert errors["Transformer"] < 0.5 * min(errors["the day before"], errors["the last hour"])
    written = {path.name for path in (folder / "runs/forecast").iterdir()}
    assert written == {"forecast.keras", "saved_model", "columns.json", "forecasts.png"}


def test_forecast_predicts_the_next_day_without_the_package(measurements, tmp_path, monkeypatch):
    folder, following, _ = measurements
    (tmp_path / "keras_transformer.py").write_text("raise ImportError('not where it is served')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    output = run(folder, "forecast.py", "predict", "--csv", "hours.csv", "--target", "air")
    lines = re.findall(r"(?m)^(\S+):00 +(-?[\d.]+)$", output)
    command = [sys.executable, str(EXAMPLES / "forecast.py"), "predict", "--csv", "hours.csv", "--target", "pressure"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "must be those of training, ['air', 'pressure']" in done.stderr
    assert [time for time, _ in lines] == [f"2023-05-01T{hour:02}" for hour in range(24)]
    forecast = np.array([float(value) for _, value in lines])
    assert np.abs(forecast - following).mean() < 0.5 * np.abs(forecast.mean() - following).mean()


def test_forecast_names_the_line_without_a_number(measurements, tmp_path):
    folder, _, _ = measurements
    lines = (folder / "hours.csv").read_text(encoding="utf-8").splitlines()
    lines[41] = lines[41].rpartition(",")[0] + ","
    (tmp_path / "hours.csv").write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, str(EXAMPLES / "forecast.py"), "train", "--csv", "hours.csv", "--target", "air"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (
        done.returncode != 0 and "'pressure' must have a finite number in each line; got none in line 42" in done.stderr
    )


@pytest.fixture(scope="module")
def topics(tmp_path_factory):
    """A folder with texts of two topics, `topics.tsv`, and what `fill_mask.py train` said of them."""
    random = np.random.default_rng(0)
    words = {"land": ["wheat", "barn", "plough", "hay"], "sea": ["wave", "sail", "harbour", "gull"]}
    lines = []
    for _ in range(1500):
        topic = str(random.choice(list(words)))
        lines.append(f"{topic}\t{' and '.join(random.choice(words[topic], size=random.integers(4, 9)))}\n")
    folder = tmp_path_factory.mktemp("topics")
    (folder / "topics.tsv").write_text("".join(lines), encoding="utf-8")
    options = ["--column", "1", "--vocabulary", "330", "--epochs", "12"]
    return folder, run(folder, "fill_mask.py", "train", "topics.tsv", *options)


def test_fill_mask_learns_what_fits(topics):
    folder, output = topics
    found, most = map(float, re.search(r"texts ([\d.]+)% are found, .* always .*: ([\d.]+)%", output).groups())
    assert found > 50 > most  # " and" can be known, a word is one of four
    assert (folder / "runs/fill_mask/learning_curve.png").exists()
    filled = run(folder, "fill_mask.py", "fill", "wheat and barn[MASK] hay and plough")
    assert filled.splitlines()[1].strip().startswith("and ")


def test_classify_goes_on_from_what_fill_mask_learned(topics):
    folder, _ = topics
    options = ["--labels", "60", "--pretrained", "runs/fill_mask/model.keras", "--epochs", "15"]
    output = run(folder, "classify.py", "train", "topics.tsv", *options)
    assert re.search(r"\d+ of \d+ weights are pretrained", output)
    assert float(re.search(r"accuracy ([\d.]+)% of 150 texts", output)[1]) > 95
    written = {path.name for path in (folder / "runs/classify").iterdir()}
    assert written == {"model.keras", "saved_model", "learning_curve.png", "confusion.png"}
    said = run(folder, "classify.py", "classify", "hay and wheat", "gull and sail and wave")
    assert [line.split()[0] for line in said.splitlines()] == ["land", "sea"]


def test_classify_starts_from_nothing_too(topics):
    folder, _ = topics
    options = ["--vocabulary", "330", "--epochs", "2", "--labels", "600"]
    output = run(folder, "classify.py", "--folder", "new", "train", "topics.tsv", *options)
    assert float(re.search(r"accuracy ([\d.]+)% of 150 texts", output)[1]) > 95
    again = run(folder, "classify.py", "--folder", "new", "evaluate", "topics.tsv")
    assert float(re.search(r"accuracy ([\d.]+)% of 1500 texts", again)[1]) > 95


def test_language_model_learns_writes_and_is_evaluated(topics):
    folder, _ = topics
    texts = [line.split("\t")[1] for line in (folder / "topics.tsv").read_text(encoding="utf-8").splitlines()]
    (folder / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    options = ["--vocabulary", "330", "--epochs", "10", "--preset", "tiny"]
    output = run(folder, "language_model.py", "train", "texts.txt", *options)
    perplexity = float(re.search(r"perplexity [\d.]+ a piece, ([\d.]+) a word", output)[1])
    assert perplexity < 4  # " and", then one of four: about 2.5 with the ends
    again = run(folder, "language_model.py", "evaluate", "texts.txt")
    assert float(re.search(r"perplexity [\d.]+ a piece, ([\d.]+) a word", again)[1]) < 4
    assert " and " in run(folder, "language_model.py", "write", "wave and sail")
