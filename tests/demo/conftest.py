import random

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small lose time by waiting for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def words(tmp_path):
    """A small text file with something to learn in it."""
    chooser = random.Random(0)
    text = " ".join(chooser.choice(["one", "two", "three\n", "four"]) for _ in range(2000))
    path = tmp_path / "words.txt"
    path.write_text(text)
    return path


@pytest.fixture
def tiny():
    """Options of a model that takes a step in milliseconds."""
    return ["--layers", "1", "--width", "16", "--heads", "2", "--context", "8", "--batch", "4"]
