"""What the comparison with other trainers counts as written, and what it divides."""

from benchmarks.against_trainers import Row, ratios
from benchmarks.trainers.lines import count_lines

RECIPE = '''"""A recipe.

Of two paragraphs.
"""

import torch  # 1


class Net(torch.nn.Module):
    def forward(self, batch):
        return batch


class Mine(Recipe):  # 2
    """What it is."""

    samples = "rows"  # 3

    def data(self, split):
        return torch.ones(3)

    # why
    def model(self):  # 4
        return Net()  # 5
'''


def test_docstrings_comments_and_blank_lines_do_not_count():
    assert count_lines(RECIPE) == 10


def test_a_recipe_without_its_network_and_data():
    assert count_lines(RECIPE, without_network_and_data=True) == 5


def test_our_seconds_are_divided_by_those_of_the_faster_run_by_run():
    def rows(*seconds: float) -> list[Row]:
        return [Row(each, 0, 0, 0, 0) for each in seconds]

    measured = {
        ("charlm", 1, "lightning"): rows(2, 4, 8),
        ("charlm", 1, "accelerate"): rows(4, 2, 8),
        ("charlm", 1, "ours"): rows(1, 3, 8),
    }
    assert list(ratios(measured)) == ["ours / the faster, charlm, ranks 1: 1.00 [0.50-1.50]"]
