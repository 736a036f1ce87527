"""What all tests share. The backend is `KERAS_BACKEND`'s, TensorFlow by default."""

import keras
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def float32_and_seeded():
    """Each test starts from float32 and the same seed, whatever the one before set."""
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)


@pytest.fixture
def rng():
    return np.random.default_rng(0)
