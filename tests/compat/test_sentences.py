"""Errors of the drop-in contain verl's own sentences, since code on verl finds errors by them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "differential"


def sentences() -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)  # its modules find each other by their bare names
        names = ("sentences_protocol", "sentences_helpers", "sentences_controller")
        return [one for name in names for one in importlib.import_module(name).SENTENCES]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("sentence", sentences(), ids=lambda sentence: sentence.where)
def test_the_error_has_verls_type_and_words(sentence: Any) -> None:
    assert sentence.said() == sentence.text
