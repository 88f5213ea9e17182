"""What is typed for an input of a workflow."""

from typing import Any

import pytest
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.interaction.click_types import FlyteLiteralConverter, UnionParamType
from flytekit.types.file import FlyteFile

from flyte_ddp.flyte1.inputs import explain_missing_paths


@pytest.mark.parametrize("kind", [str | FlyteFile, str | FlyteFile | None])
def test_a_text_may_be_given_for_what_takes_texts_as_well_as_files(monkeypatch, kind):
    monkeypatch.setattr(UnionParamType, "convert", UnionParamType.convert)  # put back afterwards
    explain_missing_paths()
    given: Any = FlyteLiteralConverter(
        FlyteContextManager.current_context(), TypeEngine.to_literal_type(kind), kind, is_remote=False
    ).click_type
    assert [given.convert(text, None, None) for text in ("hello", "")] == ["hello", ""]
