"""Forecasts the temperature of the next 24 hours from the last 24 of the weather, and ships that as a SavedModel.

    pip install --no-deps pvlib                # has the weather: a typical year in Greensboro, North Carolina
    python examples/forecast.py train          # trains, compares, plots, exports into runs/forecast
    python examples/forecast.py predict        # the hours after the last, by the SavedModel, without keras_transformer

pvlib itself is not imported, so that it needs none of what it depends on (pandas and SciPy among that). Both commands
take hourly measurements of your own instead: `--csv FILE --target COLUMN`. The file has a header, a column `time` such
as 2024-01-31T13:00, and numbers in at least one more column; columns without any number are left out.

Of each month the first days are trained on, those after them choose when to stop, the last ones test. The Transformer
is compared with ridge regression on the same numbers, the day before (seasonal naive) and the last hour (persistence).
"""

import argparse
import csv
import importlib.metadata
import json
import math
import pathlib
import sys

import numpy as np

HISTORY, HORIZON = 24, 24  # hours that are read and hours that are forecast
PARTS = {"training": (0.0, 0.6), "validation": (0.6, 0.8), "test": (0.8, 1.0)}  # of each month
SIZE = {"d_model": 32, "num_layers": 2, "num_heads": 4, "intermediate_dim": 64, "dropout": 0.1, "norm_first": True}
WEATHER = {  # columns of the file in pvlib
    "temperature": "Dry-bulb (C)",
    "dew_point": "Dew-point (C)",
    "humidity": "RHum (%)",
    "pressure": "Pressure (mbar)",
    "wind": "Wspd (m/s)",
    "cloud": "TotCld (tenths)",
    "opaque_cloud": "OpqCld (tenths)",
    "radiation": "GHI (W/m^2)",
    "direct": "DNI (W/m^2)",
    "diffuse": "DHI (W/m^2)",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/forecast"), help="of all results")
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train, compare, plot and export")
    training.add_argument("--epochs", type=int, default=16, help="at most")
    training.add_argument("--seed", type=int, default=1)
    for command in (training, commands.add_parser("predict", help="forecast the hours after the last")):
        command.add_argument("--csv", dest="path", type=pathlib.Path, help="measurements of your own")
        command.add_argument("--target", default="temperature", help="the column to forecast")
    arguments = vars(parser.parse_args())
    {"train": train, "predict": predict}[arguments.pop("command")](**arguments)


def train(folder, path, target, epochs, seed):
    import keras
    import matplotlib  # noqa: F401, now, rather than after the training

    keras.utils.set_random_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    names, times, series = read_series(path, target)
    sets = {part: windows(times, series, part) for part in PARTS}
    print(", ".join(f"{len(inputs)} windows for {part}" for part, (inputs, _) in sets.items()))

    model = forecaster(*sets["training"])
    model.summary()
    steps = epochs * math.ceil(len(sets["training"][0]) / 64)
    warmup = steps // 20
    rate = keras.optimizers.schedules.CosineDecay(0.0, steps - warmup, warmup_target=1e-3, warmup_steps=warmup)
    model.compile(keras.optimizers.AdamW(rate, weight_decay=0.05), "mae", jit_compile=False)  # no faster on a CPU
    stop = keras.callbacks.EarlyStopping("val_loss", patience=5, restore_best_weights=True)
    model.fit(*sets["training"], 64, epochs, validation_data=sets["validation"], callbacks=[stop], verbose=2)
    methods = {
        "Transformer": lambda inputs: model.predict(inputs, verbose=0),
        "linear": linear(*sets["training"], *sets["validation"]),
        "the day before": day_before,
        "the last hour": last_hour,
    }
    for part in ("validation", "test"):
        inputs, targets = sets[part]
        forecasts = {name: method(inputs) for name, method in methods.items()}
        errors = {name: np.abs(forecast - targets).mean(axis=0) for name, forecast in forecasts.items()}
        show_errors(f"mean absolute error on {len(inputs)} windows for {part}, by hours ahead:", errors)
    plot(inputs, targets, forecasts, errors, target, folder / "forecasts.png")
    model.save(folder / "forecast.keras")
    model.export(folder / "saved_model", verbose=False)
    (folder / "columns.json").write_text(json.dumps(names), encoding="utf-8")
    print(f"wrote {', '.join(sorted(path.name for path in folder.iterdir()))} into {folder}")


def predict(folder, path, target):
    """What a server does: TensorFlow and the SavedModel."""
    import tensorflow as tf

    model = folder / "saved_model"
    if not model.exists():
        sys.exit(f"{model} is not there: run `python examples/forecast.py train` first.")
    names, times, series = read_series(path, target)
    if names != (known := json.loads((folder / "columns.json").read_text(encoding="utf-8"))):
        raise ValueError(f"The target and the other columns must be those of training, {known}; got {names}.")
    if np.sum(np.diff(times[-HISTORY:]).astype(int) == 1) != HISTORY - 1:
        raise ValueError(f"The last {HISTORY} lines must be an hour apart; got {times[-HISTORY:]}.")
    forecast = tf.saved_model.load(str(model)).signatures["serving_default"]
    (values,) = forecast(series=tf.constant(series[None, -HISTORY:])).values()
    print(f"{target} of the {HORIZON} hours after {times[-1]}:")
    for hours, value in enumerate(values[0].numpy(), 1):
        print(f"{times[-1] + hours}:00  {value:7.2f}")


def forecaster(inputs, targets):
    """A model of windows and forecasts in their own units.

    A regressor says how much each of the hours to come differs from the last one. A linear layer on the target's last
    day is added to it, as in Lai et al. 2017, https://arxiv.org/abs/1703.07015: the nearest hours need little more.
    """
    import keras

    import keras_transformer as kt

    scale, unscale = keras.layers.Normalization(), keras.layers.Normalization(invert=True)
    scale.adapt(inputs)
    unscale.adapt(targets - inputs[:, -1:, 0])
    regressor = kt.build_regressor(inputs.shape[-1], HORIZON, **SIZE)
    series = keras.Input(inputs.shape[1:], name="series")
    scaled = scale(series)
    nearest = keras.layers.Dense(HORIZON, kernel_initializer="zeros")(scaled[:, -HORIZON:, 0])
    forecast = series[:, -1:, 0] + unscale(regressor(scaled) + nearest)
    return keras.Model(series, forecast, name="forecaster")


def day_before(series):
    """The forecast that each hour is as it was a day before."""
    return series[:, -HORIZON:, 0]


def last_hour(series):
    """The forecast that nothing changes."""
    return np.repeat(series[:, -1:, 0], HORIZON, axis=1)


def linear(inputs, targets, valid_inputs, valid_targets):
    """The forecast by ridge regression on all numbers of a window, its penalty chosen by the validation windows."""
    x, y = inputs.reshape(len(inputs), -1).astype("float64"), targets - inputs[:, -1:, 0]
    mean, deviation, y_mean = x.mean(axis=0), x.std(axis=0) + 1e-6, y.mean(axis=0)
    x = (x - mean) / deviation
    values, vectors = np.linalg.eigh(x.T @ x)
    projected = vectors.T @ x.T @ (y - y_mean)

    def forecast(series, penalty):
        weights = vectors @ (projected / (values + penalty)[:, None])
        return series[:, -1:, 0] + (series.reshape(len(series), -1) - mean) / deviation @ weights + y_mean

    penalties = len(x) * 10.0 ** np.arange(-6, 2, 0.5)
    best = min(penalties, key=lambda penalty: np.abs(forecast(valid_inputs, penalty) - valid_targets).mean())
    return lambda series: forecast(series, best)


def read_series(path, target):
    """Names of columns, hours [T], and float32 [T, F]: the target, the other columns, hour of day and day of year."""
    rows = list(read_weather() if path is None else csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines()))
    columns = {}
    for name in [name for row in rows[:1] for name in row if name != "time"]:
        values = [number(row.get(name)) for row in rows]
        gaps = [line for line, value in enumerate(values, 2) if value is None]
        if not gaps:
            columns[name] = values
        elif len(gaps) < len(rows):
            raise ValueError(f"Column {name!r} must have a finite number in each line; got none in line {gaps[0]}.")
    if target not in columns or "time" not in rows[0]:
        raise ValueError(f"There must be a column 'time' and numbers in {target!r}; got numbers in {list(columns)}.")
    times = np.array([row["time"] for row in rows], "datetime64[h]")
    days = times.astype("datetime64[D]")
    hour = (times - days) / np.timedelta64(1, "D")
    day = (days - days.astype("datetime64[Y]")) / np.timedelta64(365, "D")
    clock = [wave(2 * np.pi * turn) for wave in (np.sin, np.cos) for turn in (hour, day)]
    names = [target, *(name for name in columns if name != target)]
    return names, times, np.stack([*(columns[name] for name in names), *clock], axis=1).astype("float32")


def number(text):
    """A finite number, or None."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def read_weather():
    """The hours of the TMY3 file in pvlib: each month is one of another year."""
    try:
        path = pathlib.Path(importlib.metadata.distribution("pvlib").locate_file("pvlib/data/723170TYA.CSV"))
    except importlib.metadata.PackageNotFoundError:
        sys.exit("The weather is in the package pvlib: run `pip install --no-deps pvlib` first, or give a `--csv`.")
    for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()[1:]):  # the first line is the station
        month, day, year = row["Date (MM/DD/YYYY)"].split("/")
        hour = int(row["Time (HH:MM)"][:2]) - 1  # 01:00 is the end of a day's first hour
        angle = math.radians(float(row["Wdir (degrees)"]))
        yield {
            "time": f"{year}-{month}-{day}T{hour:02}:00",
            **{name: row[column] for name, column in WEATHER.items()},
            "from_north": math.cos(angle),
            "from_east": math.sin(angle),
        }


def windows(times, series, part):
    """(hours read [N, HISTORY, F], the target of those that follow [N, HORIZON]) in a part of each month.

    No window goes over the end of a part, nor over a gap in time.
    """
    months = times.astype("datetime64[M]")
    starts = np.flatnonzero((np.diff(times).astype(int) != 1) | (months[1:] != months[:-1])) + 1
    found = []
    for run in np.split(series, starts):
        first, last = (round(share * len(run)) for share in PARTS[part])
        if last - first >= HISTORY + HORIZON:
            found.append(np.lib.stride_tricks.sliding_window_view(run[first:last], HISTORY + HORIZON, axis=0))
    if not found:
        raise ValueError(f"Some month must have {HISTORY + HORIZON} hours in a row for {part}; got none that has.")
    found = np.concatenate(found).swapaxes(1, 2)
    return found[:, :HISTORY], found[:, HISTORY:, 0]


def show_errors(title, errors):
    print(f"\n{title}\n{'':16}{'1':>8}{'6':>8}{'24':>8}{'mean':>8}")
    for name, error in errors.items():
        print(f"{name:16}{error[0]:8.2f}{error[5]:8.2f}{error[23]:8.2f}{error.mean():8.2f}")


def plot(inputs, targets, forecasts, errors, target, path):
    """Errors by hours ahead, and the window that the Transformer forecasts neither well nor badly: the median one."""
    import matplotlib.pyplot as plt

    place = np.argsort(np.abs(forecasts["Transformer"] - targets).mean(axis=1))[len(targets) // 2]
    ahead = range(1, HORIZON + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    right.plot(range(1 - HISTORY, 1), inputs[place, :, 0], color="gray", label="read")
    right.plot(ahead, targets[place], color="black", label="came")
    for name, forecast in forecasts.items():
        left.plot(ahead, errors[name], label=name)
        right.plot(ahead, forecast[place], linestyle="-" if name == "Transformer" else ":", label=name)
    left.set(xlabel="hours ahead", ylabel="mean absolute error", title=f"Forecasts of {target}", ylim=(0, None))
    right.set(xlabel="hours ahead", ylabel=target, title="A forecast as good as the median one")
    left.legend()
    right.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
