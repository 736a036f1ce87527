"""The short example of the README: learns to write words backwards, in seconds, and exports it from text to text."""

import random

import keras

import keras_transformer as kt

random.seed(0)
keras.utils.set_random_seed(0)
words = ["".join(random.choices("abcdefgh", k=random.randint(1, 7))) for _ in range(20000)]
pairs = [(word, word[::-1]) for word in words]
tokenizer = kt.Tokenizer.train(words, kind="char")
batches = kt.pair_batches(pairs, tokenizer, tokenizer, tokens_per_batch=2048, max_length=8, shuffle=20000)

model = kt.build_transformer(tokenizer.vocab_size, d_model=64, num_layers=1, num_heads=4, intermediate_dim=128)
model.compile(keras.optimizers.Adam(3e-3), kt.TokenCrossentropy(), metrics=[kt.TokenAccuracy()], jit_compile=False)
model.fit(batches, epochs=6, shuffle=False)

translator = kt.Translator(model, tokenizer, tokenizer, max_length=16)
print(translator(["abc", "badge", "head"]))
translator.export("runs/reverse")  # a SavedModel: strings in, strings out
