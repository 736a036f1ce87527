"""Trains a `base`-size Transformer with `model.fit` on Keras's JAX backend in mixed_bfloat16, and measures it.

    KERAS_BACKEND=jax python benchmarks/gpu.py                         # on a GPU
    KERAS_BACKEND=jax python benchmarks/gpu.py --preset tiny --rows 4 --steps 3    # tries it on a CPU

Random ids of one length, so that nothing but the model is timed: tokens a second (source and target), model FLOPs
utilization (the FLOPs of the matrix products of forward and backward, counted once, over the device's dense bfloat16
peak) and peak memory.
"""

import argparse
import time

import jax
import keras
import numpy as np
from results import record, table, versions

import keras_transformer as kt

PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L4": 121, "T4": 65}  # makers' data sheets, dense 16-bit


def step_flops(preset, vocabulary, rows, length):
    """FLOPs of one training step: 2 a multiply-add, backward twice forward; the triangle's empty half is counted."""
    width, layers, inner = preset["d_model"], preset["num_layers"], preset["intermediate_dim"]
    tokens = rows * length
    attention = 4 * width * width + 2 * length * width  # multiply-adds a token: projections, scores and their sum
    feed_forward = 2 * width * inner
    block = layers * ((attention + feed_forward) + (2 * attention + feed_forward))
    return 3 * 2 * tokens * (block + width * vocabulary)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(kt.PRESETS), default="base")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--peak-tflops", type=float, help="of the device in bfloat16, where it is not a known one")
    args = parser.parse_args()
    if keras.backend.backend() != "jax":
        parser.error("set KERAS_BACKEND=jax")

    keras.config.set_dtype_policy("mixed_bfloat16")
    preset = kt.PRESETS[args.preset]
    model = kt.build_transformer(args.vocabulary, **preset)
    model.compile(
        keras.optimizers.Adam(kt.WarmupInverseSqrt(preset["d_model"]), beta_2=0.98, epsilon=1e-9),
        kt.TokenCrossentropy(label_smoothing=0.1),
        jit_compile=True,
    )
    shape = (args.rows * args.steps, args.length)
    ids = np.random.default_rng(0).integers(4, args.vocabulary, size=shape).astype("int32")
    data = {"source": ids, "target": ids}, ids

    start = time.perf_counter()
    model.fit(*data, batch_size=args.rows, epochs=1, shuffle=False, verbose=2)  # compiles
    first = time.perf_counter() - start
    start = time.perf_counter()
    model.fit(*data, batch_size=args.rows, epochs=1, shuffle=False, verbose=2)
    step = (time.perf_counter() - start) / args.steps

    device = jax.devices()[0]
    peak = args.peak_tflops or next((v for k, v in PEAK_TFLOPS.items() if k in device.device_kind), None)
    flops = step_flops(preset, args.vocabulary, args.rows, args.length) / step
    memory = (device.memory_stats() or {}).get("peak_bytes_in_use")
    row = [
        device.device_kind,
        f"{args.preset}, {args.rows} x {args.length} + {args.length}, vocabulary {args.vocabulary}",
        f"{step * 1e3:.1f}",
        f"{2 * args.rows * args.length / step:,.0f}",
        f"{flops / 1e12:.1f}" + (f" ({flops / 1e12 / peak:.0%} of {peak})" if peak else ""),
        f"{memory / 2**30:.1f}" if memory else "not reported",
        f"{first - step * args.steps:.0f}",
    ]
    columns = ["device", "model", "ms a step", "tokens a second", "TFLOP/s (MFU)", "peak memory, GiB", "compiling, s"]
    text = f"{versions('keras', 'jax')}, mixed_bfloat16.\n\n{table(columns, [row])}"
    record(f"Training on {device.device_kind}", text)


if __name__ == "__main__":
    main()
