"""Trains a tokenizer on the documents of a causal LM's recipe, where no hub gives one: bytes, merged by frequency.

    python scripts/make_tokenizer.py recipes/lm-smoke.yaml --vocab-size 2048

It is written where the recipe's model.tokenizer says, and HelixTokenizer builds on it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from helixctl.data.records import Text
from helixctl.data.sources import open_source
from helixctl.models.tokenizer import END_OF_TEXT, HelixTokenizer
from helixctl.plugins import FORMATS, load_plugin
from helixctl.recipe.causal_lm import CausalLMRecipe
from helixctl.recipe.load import load_any_recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--vocab-size", type=int, default=2048, help="tokens, without those of the chat template")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for helixctl")
    asked = parser.parse_args()
    recipe = load_any_recipe(asked.recipe, asked.set)
    if not isinstance(recipe, CausalLMRecipe) or recipe.model.tokenizer is None:
        parser.error("the recipe must be one of a causal LM that names a tokenizer")
    folder = Path(recipe.model.tokenizer)
    tokenizer = train(texts(recipe), asked.vocab_size)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT).save_pretrained(folder)
    made = HelixTokenizer(folder)
    print(f"{folder}: {len(made):,} tokens with those of the chat template; vocab_size: {made.padded_vocab_size}")


def texts(recipe: CausalLMRecipe) -> Iterator[str]:
    """The plain texts among the recipe's training documents; what cannot be read is `prepare`'s business."""
    for source in recipe.data.train:
        parse = load_plugin(FORMATS, source.format).parse
        for piece in open_source(source).pieces():
            record = parse(piece, source)
            if isinstance(record, Text):
                yield record.text


def train(documents: Iterator[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with a token that ends texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


if __name__ == "__main__":
    main()
