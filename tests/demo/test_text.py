import math

import pytest
import torch

from scaledtensor.apps.text import Corpus, draw_batch, load, read_text, stdlib_text
from scaledtensor.errors import TextError


def test__standard_library__is_the_same_every_time_and_has_few_characters():
    first, second = stdlib_text(100_000), stdlib_text(100_000)
    assert first == second
    assert len(first) == 100_000
    assert set(first) <= {"\n", *map(chr, range(32, 127))}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),  # a byte order mark and nothing else
        (b"text\0text", "byte 4 is NUL"),
        (b"caf\xe9 au lait", "not UTF-8 text: .* at byte 3"),
        (b"short", "has 5 characters; a context of 8 needs at least 81"),
    ],
)
def test__unusable_text__is_refused_with_its_reason(tmp_path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TextError, match=message) as caught:
        load(path, block_size=8)
    assert str(path) in str(caught.value)


def test__directory__is_no_text(tmp_path):
    with pytest.raises(TextError, match="is a directory"):
        read_text(tmp_path)


def test__shortest_text__is_the_one_the_error_names():
    corpus = Corpus.from_text("it", "ab" * 40 + "c", block_size=8)
    assert len(corpus.held_out) == 9
    with pytest.raises(TextError):
        Corpus.from_text("it", "ab" * 40, block_size=8)


def test__corpus__decodes_to_the_text_and_splits_nine_to_one():
    text = "Grüße, \U0001f44b und\ttschüss.\n" * 50
    corpus = Corpus.from_text("it", text, block_size=8)
    tokens = torch.cat((corpus.train, corpus.held_out))
    assert corpus.decode(tokens) == text
    assert torch.equal(corpus.encode(text), tokens)
    assert len(corpus.train) == math.floor(0.9 * len(text))
    assert corpus.vocabulary == "".join(sorted(set(text)))


def test__character_that_the_text_lacks__has_no_token():
    corpus = Corpus.from_text("it", "abc" * 100, block_size=8)
    with pytest.raises(TextError, match="'xy' does not occur in it"):
        corpus.encode("axby")


def test__batches__follow_the_generator_alone_and_targets_are_one_ahead():
    tokens = torch.arange(1000)
    inputs, targets = draw_batch(tokens, 8, 4, torch.Generator().manual_seed(3))
    again, _ = draw_batch(tokens, 8, 4, torch.Generator().manual_seed(3))
    assert torch.equal(inputs, again)
    assert torch.equal(targets, inputs + 1)


def test__batches__reach_the_first_and_the_last_character():
    tokens = torch.arange(10)
    inputs, targets = draw_batch(tokens, 8, 100, torch.Generator().manual_seed(0))
    assert inputs.min() == 0
    assert targets.max() == 9
