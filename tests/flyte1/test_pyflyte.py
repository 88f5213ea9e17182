"""What a local run says of results from the cache."""

from flytekit.models.literals import Literal, Primitive, Scalar

from flyte_ddp.flyte1.pyflyte import print_cached


def test_outputs_of_another_task_that_have_the_same_names_are_no_training(capsys):
    text = Literal(scalar=Scalar(primitive=Primitive(string_value="words")))
    print_cached({"model_state": text, "summary": text, "report": text})
    assert capsys.readouterr() == ("", "")
