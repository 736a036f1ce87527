"""Each family of published models against its formulas in NumPy, with random weights in files of its form.

`test_pretrained.py` compares with the code that the weights come from, where that is installed.
"""

import json
import math

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

import keras_transformer as kt

D, LAYERS, HEADS, INNER, VOCAB, LENGTHS = 16, 2, 4, 24, 40, (9, 6)
erf = np.vectorize(math.erf)


def gelu(x):
    return x * (1 + erf(x / math.sqrt(2))) / 2


def gelu_tanh(x):
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def silu(x):
    return x / (1 + np.exp(-x))


def layer_norm(x, weight, bias, epsilon):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight + bias


def rms_norm(x, weight, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight


def attention(query, key, value, hidden):
    """`[B, N, T, H]`; keys and values have fewer heads, each for neighbouring ones of the queries."""
    key, value = (np.repeat(x, query.shape[1] // x.shape[1], axis=1) for x in (key, value))
    scores = np.where(hidden, -1e9, query @ key.swapaxes(2, 3) / math.sqrt(query.shape[-1]))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = weights / weights.sum(-1, keepdims=True) @ value
    return mixed.swapaxes(1, 2).reshape(*mixed.shape[::2], -1)


def heads(x, number):
    return x.reshape(*x.shape[:2], number, -1).swapaxes(1, 2)


def later(length):
    return np.triu(np.ones((length, length), bool), 1)


class Weights(dict):
    """Random arrays by name, made when they are first asked for."""

    def __init__(self):
        super().__init__()
        self.random = np.random.default_rng(0)

    def get(self, name, *shape):
        start = 1.0 if len(shape) == 1 and name.endswith("weight") else 0.0
        scale = 1.0 if "emb" in name or name.startswith("w") else 0.3
        return self.setdefault(name, (start + scale * self.random.normal(size=shape)).astype("float32"))

    def linear(self, name, x, out, bias=True):
        """PyTorch's, `[out, in]`."""
        y = x @ self.get(f"{name}.weight", out, x.shape[-1]).T
        return y + self.get(f"{name}.bias", out) if bias else y

    def norm(self, name, x, epsilon):
        return layer_norm(x, self.get(f"{name}.weight", D), self.get(f"{name}.bias", D), epsilon)


def bert(weights, ids):
    hidden, eps = (ids == 0)[:, None, None, :], 1e-5
    table = weights.get("embeddings.word_embeddings.weight", VOCAB, D)
    places = weights.get("embeddings.position_embeddings.weight", 32, D)
    x = table[ids] + places[: ids.shape[1]] + weights.get("embeddings.token_type_embeddings.weight", 2, D)[0]
    x = weights.norm("embeddings.LayerNorm", x, eps)
    for i in range(LAYERS):
        name = f"encoder.layer.{i}"
        parts = [weights.linear(f"{name}.attention.self.{part}", x, D) for part in ("query", "key", "value")]
        y = attention(*(heads(part, HEADS) for part in parts), hidden)
        x = weights.norm(
            f"{name}.attention.output.LayerNorm", x + weights.linear(f"{name}.attention.output.dense", y, D), eps
        )
        y = weights.linear(f"{name}.output.dense", gelu(weights.linear(f"{name}.intermediate.dense", x, INNER)), D)
        x = weights.norm(f"{name}.output.LayerNorm", x + y, eps)
    return x


def gpt2(weights, ids):
    eps = 1e-4

    def conv(name, x, out):  # `[in, out]`
        return x @ weights.get(f"{name}.weight", x.shape[-1], out) + weights.get(f"{name}.bias", out)

    table = weights.get("transformer.wte.weight", VOCAB, D)
    x = table[ids] + weights.get("transformer.wpe.weight", 32, D)[: ids.shape[1]]
    for i in range(LAYERS):
        name = f"transformer.h.{i}"
        parts = np.split(conv(f"{name}.attn.c_attn", weights.norm(f"{name}.ln_1", x, eps), 3 * D), 3, axis=-1)
        y = attention(*(heads(part, HEADS) for part in parts), later(ids.shape[1]))
        x = x + conv(f"{name}.attn.c_proj", y, D)
        y = gelu_tanh(conv(f"{name}.mlp.c_fc", weights.norm(f"{name}.ln_2", x, eps), INNER))
        x = x + conv(f"{name}.mlp.c_proj", y, D)
    return weights.norm("transformer.ln_f", x, eps) @ table.T


def llama(weights, ids):
    """Untied, 4 heads of 6 numbers with 2 of keys and values, rotary positions stretched by 2."""
    size, eps = 6, 1e-5
    angles = np.arange(ids.shape[1])[:, None] / 2 / 500.0 ** (np.arange(0, size, 2) / size)
    cos, sin = (np.concatenate([f(angles)] * 2, axis=-1) for f in (np.cos, np.sin))

    def turned(x):
        return x * cos + np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], axis=-1) * sin

    def norm(name, x):
        return rms_norm(x, weights.get(f"{name}.weight", D), eps)

    x = weights.get("model.embed_tokens.weight", VOCAB, D)[ids]
    for i in range(LAYERS):
        name = f"model.layers.{i}"
        y = norm(f"{name}.input_layernorm", x)
        numbers = {"q": HEADS, "k": 2, "v": 2}
        q, k, v = (
            heads(weights.linear(f"{name}.self_attn.{p}_proj", y, n * size, False), n) for p, n in numbers.items()
        )
        y = attention(turned(q), turned(k), v, later(ids.shape[1]))
        x = x + weights.linear(f"{name}.self_attn.o_proj", y, D, False)
        y = norm(f"{name}.post_attention_layernorm", x)
        gate = silu(weights.linear(f"{name}.mlp.gate_proj", y, INNER, False))
        y = gate * weights.linear(f"{name}.mlp.up_proj", y, INNER, False)
        x = x + weights.linear(f"{name}.mlp.down_proj", y, D, False)
    return weights.linear("lm_head", norm("model.norm", x), VOCAB, False)


BERT = {"vocab_size": VOCAB, "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
BERT.update(intermediate_size=INNER, max_position_embeddings=32, layer_norm_eps=1e-5, hidden_act="gelu")
BERT.update(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, pad_token_id=0)
GPT2 = {"vocab_size": VOCAB, "n_embd": D, "n_layer": LAYERS, "n_head": HEADS, "n_inner": INNER, "n_positions": 32}
GPT2.update(layer_norm_epsilon=1e-4, activation_function="gelu_new", resid_pdrop=0.1, attn_pdrop=0.1)
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "head_dim": 6,
}
LLAMA.update(intermediate_size=INNER, num_key_value_heads=2, hidden_act="silu", rms_norm_eps=1e-5, rope_theta=500.0)
LLAMA.update(rope_scaling={"rope_type": "linear", "factor": 2.0})
FAMILIES = {"bert": (bert, BERT), "gpt2": (gpt2, GPT2), "llama": (llama, LLAMA)}


@pytest.fixture(params=FAMILIES)
def published(request, tmp_path, rng):
    """(a folder of the family's form, ids with padding behind the second row, what the formulas make of them)."""
    formulas, config = FAMILIES[request.param]
    ids = rng.integers(1, VOCAB, (len(LENGTHS), max(LENGTHS)))
    ids[1, LENGTHS[1] :] = 0
    weights = Weights()
    expected = formulas(weights, ids)
    save_file(dict(weights), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": request.param, **config}), encoding="utf-8")
    return tmp_path, ids, expected


def test_outputs_are_those_of_the_formulas(published):
    folder, ids, expected = published
    found = np.asarray(kt.load_pretrained(folder)(ids))
    np.testing.assert_allclose(found[ids != 0], expected[ids != 0], atol=1e-4)


def test_dropout_acts_in_training_and_a_policy_reaches_everything(published):
    folder, ids, expected = published
    model = kt.load_pretrained(folder, dtype="mixed_bfloat16")
    assert {
        layer.compute_dtype for layer in model._flatten_layers() if layer.weights and not isinstance(layer, keras.Model)
    } == {"bfloat16"}
    found = np.asarray(keras.ops.cast(model(ids), "float32"))
    assert np.abs(found - expected)[ids != 0].mean() < 0.05 * np.abs(expected).mean()
    if "llama" not in model.name:  # which has none
        trained = np.asarray(keras.ops.cast(model(ids, training=True), "float32"))
        assert np.abs(trained - found).mean() > 0.01


def test_files_in_parts_are_put_together_and_leftovers_are_named(published):
    from safetensors.numpy import load_file

    folder, ids, expected = published
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {f"model-0000{part}-of-00002.safetensors": names[part::2] for part in (0, 1)}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, own in parts.items() for name in own}}))
    save_file({"other": np.zeros(3)}, folder / "model_old.safetensors")  # nobody asks for it
    found = np.asarray(kt.load_pretrained(folder)(ids))
    np.testing.assert_allclose(found[ids != 0], expected[ids != 0], atol=1e-4)
    left = {"classifier.weight": tensors[names[0]], "other": tensors[names[0]]}
    save_file({**{name: tensors[name] for name in names[::2]}, **left}, folder / "model.safetensors")
    index.unlink()
    with pytest.raises(ValueError) as error:
        kt.load_pretrained(folder, unused=("classifier.",))
    assert "other: of no use here" in str(error.value) and "classifier" not in str(error.value)
    assert all(f"{name}: not there" in str(error.value) for name in names[1::2])


def test_a_model_reloads_equal(published, tmp_path):
    folder, ids, _ = published
    model = kt.load_pretrained(folder)
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras")(ids), model(ids))


def written(folder, family, change=lambda weights: None, formulas=None, **options):
    """A folder of the family, with some weights and options changed, and ids with what the formulas make of them."""
    own, config = FAMILIES[family]
    ids, weights = np.random.default_rng(1).integers(1, VOCAB, (2, 9)), Weights()
    expected = (formulas or own)(weights, ids)
    change(weights)
    save_file(dict(weights), folder / "model.safetensors")
    config = {"model_type": family, **config, **options}
    config = {name: value for name, value in config.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return ids, expected


def test_a_config_that_lacks_a_size_is_refused(tmp_path):
    written(tmp_path, "bert", hidden_size="absent")
    with pytest.raises(ValueError, match="config.json of a bert model must have 'hidden_size'"):
        kt.load_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`unused` must be a tuple of names; got 'pooler'"):
        kt.load_pretrained(tmp_path, unused="pooler")


def old_names(weights):
    for name in [name for name in weights if "LayerNorm" in name]:
        weights[name.replace(".weight", ".gamma").replace(".bias", ".beta")] = weights.pop(name)


def tie(weights):
    weights["lm_head.weight"] = weights["transformer.wte.weight"].copy()


FORMS = {
    "old names": ("bert", old_names, {}),
    "a head that is the table": ("gpt2", tie, {}),
    "defaults": ("gpt2", lambda weights: None, {"n_inner": INNER, "attn_pdrop": "absent", "resid_pdrop": "absent"}),
    "rope_parameters": (
        "llama",
        lambda weights: None,
        {
            "rope_scaling": "absent",
            "rope_theta": "absent",
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        },
    ),
    "a window that Llama has not": ("llama", lambda weights: None, {"sliding_window": 3, "attention_dropout": None}),
}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_the_same_are_read(form, tmp_path):
    family, change, options = FORMS[form]
    ids, expected = written(tmp_path, family, change, **options)
    np.testing.assert_allclose(kt.load_pretrained(tmp_path)(ids), expected, atol=1e-4)


def test_bfloat16_is_read(tmp_path):
    import ml_dtypes

    def change(weights):
        weights.update({name: x.astype(ml_dtypes.bfloat16) for name, x in weights.items()})

    ids, expected = written(tmp_path, "llama", change)
    found = np.asarray(kt.load_pretrained(tmp_path)(ids))
    assert np.abs(found - expected).mean() < 0.05 * np.abs(expected).mean()


REFUSED = {
    "a tied head that differs": ("gpt2", {}, r"lm_head.weight: not equal to transformer.wte.weight"),
    "untied GPT-2": ("gpt2", {"tie_word_embeddings": False}, "options of a gpt2 model"),
    "an activation": ("bert", {"hidden_act": "leaky_relu"}, "The activation must be one of .*; got 'leaky_relu'"),
    "kinds of layers": ("llama", {"layer_types": ["sliding_attention", "full_attention"]}, "All layers must be of one"),
    "rope by layers": ("llama", {"rope_parameters": {"full_attention": {}}}, "Rotary positions must be of the type"),
    "a part of each head": ("llama", {"partial_rotary_factor": 0.5}, "with {'partial_rotary_factor': 0.5}"),
    "yarn": (
        "llama",
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}, "max_position_embeddings": 64},
        "got 'yarn' with {'truncate': False}",
    ),
    "dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "got 'dynamic'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_another_model_is_refused(case, tmp_path):
    family, options, rule = REFUSED[case]

    def change(weights):
        if not options:
            weights["lm_head.weight"] = weights["transformer.wte.weight"] + 1

    written(tmp_path, family, change, **options)
    with pytest.raises(ValueError, match=rule):
        kt.load_pretrained(tmp_path)
